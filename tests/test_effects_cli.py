"""The command: columns, what is stored, the summary, curves, and effects in wiring, top and figures."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, build
from headspan.cli import _run
from headspan.running.effects import attach, effects, effects_in
from headspan.running.effects_curve import effects_curve
from headspan.running.effects_summary import predictors_of, summarise_effects
from headspan.vocabulary.errors import HeadspanError

pytest.importorskip("torch")
pytest.importorskip("transformers")

COLUMNS = ["pairing", "source", "target", "score", "rank", "effect"]
MEASURED = ["effect_unit", "large_effect", "random_write_ratio", "percentile_in_layers"]
QUICK = ["--random", "--sequences", "2", "--length", "12"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("result") / "demo.safetensors"
    assert _run(["score", "demo", "--out", str(path), "--pairing", "flow"]) == 0
    return path


@pytest.fixture(scope="module")
def filled(result: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result with effects in it."""
    path = tmp_path_factory.mktemp("filled") / "demo.safetensors"
    path.write_bytes(result.read_bytes())
    assert _run(["effects", "demo", "--into", str(path), *QUICK]) == 0
    return path


def printed(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 0) -> str:
    capsys.readouterr()
    assert _run(arguments) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_the_best_scored_edges_of_a_result(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, ["effects", "demo", str(result), "-k", "3", "--json", *QUICK]))
    assert [row["rank"] for row in rows] == [1, 2, 3] * 3
    assert list(rows[0])[:10] == COLUMNS + MEASURED
    assert all(0 <= row["effect"] <= 1 for row in rows if row["pairing"] != "OV")
    assert rows[0]["change_induction"] is not None and rows[-1]["change_induction"] is None
    best = hs.load(result)["pk", "OK"].top(1)[0]
    assert (rows[3]["source"], rows[3]["target"]) == (str(best.source), str(best.target))


def test_all_edges_as_csv(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ["effects", "demo", "--all", "--csv", "--pairing", "OK", *QUICK])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 64 and list(rows[0])[:10] == COLUMNS + MEASURED
    values = [float(row["effect"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert sorted(int(row["rank"]) for row in rows) == list(range(1, 65))


def test_the_table_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns, with units, floors and the number of tokens."""
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, ["effects", "demo", "-k", "2", *QUICK])
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines() if line[:2] in ("OQ", "OK", "OV")]
    assert {(line[0], line[6]) for line in lines} == {("OQ", "TV"), ("OK", "TV"), ("OV", "norm")}
    assert lines[2][-2] == "ind" and float(lines[2][-1]) < -0.2
    text = " ".join(text.split())
    assert "random (48 tokens)" in text and "0.05 for OQ, 0.05 for OK, 0.1 for OV" in text


def test_a_reader_sees_the_strongest_and_how_to_see_all(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (printed(capsys, ["effects", "demo", *more, *QUICK]).splitlines() for more in ([], ["--all"]))
    assert "60 of 192 edges" in " ".join(" ".join(short).split())
    listed = [[line for line in lines if line[:2] in ("OQ", "OK", "OV")] for lines in (short, long)]
    assert [len(lines) for lines in listed] == [60, 192]
    assert listed[0] == [line for start in (0, 64, 128) for line in listed[1][start : start + 20]]
    whole = printed(capsys, ["effects", "demo", "--csv", *QUICK])
    assert len(whole.splitlines()) == 193 and "shown" not in whole


def test_effects_live_in_the_result(filled: Path, result: Path) -> None:
    before, after = hs.load(result), hs.load(filled)
    assert effects_in(before) is None
    found = effects_in(after)
    again = effects("demo", random=True, sequences=2, length=12)
    assert found is not None and found.materials == ("random",) and found.protocol["ablate"] == "resample"
    for key, values in again.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], values)
    for key, values in again.clean.items():
        np.testing.assert_allclose(found.clean[key], values, atol=1e-7)
    for key in before.arrays:
        np.testing.assert_array_equal(before.arrays[key], after.arrays[key])


def test_a_bad_result_is_reported_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.safetensors"
    hs.score(hs.open(build(FAMILIES["llama"])), metric=["pk"], pairing="flow").save(other)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("headspan.running.effects.running", never)
    assert "another model" in printed(capsys, ["effects", "demo", "--into", str(other)], 2)
    assert "no result file" in printed(capsys, ["effects", "demo", "--into", str(tmp_path / "none.safetensors")], 2)
    weights = Path(hs.__file__).parent / "data" / "demo" / "model.safetensors"
    assert printed(capsys, ["effects", "demo", "--into", str(weights)], 2)  # never over the model itself
    assert "there is no file" in printed(capsys, ["effects", "demo", "--text", str(tmp_path / "none.txt")], 2)


def test_stopping_keeps_what_was_measured(
    result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part.safetensors"
    path.write_bytes(result.read_bytes())
    from headspan.running import effect_sums as measuring

    seen = []
    original = measuring.Measuring._edges_into

    def stop(self: Any, place: int, *args: Any) -> None:
        seen.append(place)
        if len(seen) > 4:  # two layers, two sequences on random tokens; then the text
            raise KeyboardInterrupt
        original(self, place, *args)

    monkeypatch.setattr(measuring.Measuring, "_edges_into", stop)
    arguments = ["effects", "demo", "--into", str(path), "--sequences", "2", "--length", "12", "--json", "-k", "1"]
    capsys.readouterr()
    assert _run(arguments) == 130
    found = effects_in(hs.load(path))
    assert found is not None and found.interrupted and found.materials == ("random",)


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, ["effects", "demo", "--summary", "--json", *QUICK]))
    observed = ["influence (random)", "spread × sensitivity (random)"]
    predictors = ["pk raw", "pk folded", "cs raw", "cs folded", *observed, "layer distance", "write norm"]
    assert [row["predictor"] for row in rows] == predictors * 3
    assert all(row["edges"] == 64 and row["largest_edges"] == 1 for row in rows)
    for row in rows:
        if row["ap"] is not None and row["ap_low"] is not None:
            assert 0 <= row["ap_low"] <= row["ap_high"] <= 1


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run once for the same arguments."""
    known: dict[str, Any] = {}

    def measure(*words: Any, **options: Any) -> Any:
        key = repr((words, sorted((name, value) for name, value in options.items() if name != "progress")))
        if key not in known:
            known[key] = function(*words, **options)
        return known[key]

    return measure


@pytest.mark.parametrize("materials", [QUICK, []])
def test_the_summary_fits_80_columns_and_has_every_number(
    materials: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("effects", "observe", "effects_summary"):  # what three outputs show is measured once
        module = importlib.import_module(f"headspan.running.{name}")
        monkeypatch.setattr(module, name, remembered(getattr(module, name)))
    options = ["effects", "demo", "--summary", *materials]
    text = printed(capsys, options)
    assert max(map(len, text.splitlines())) <= 80 and "differences" in text
    monkeypatch.setenv("COLUMNS", "120")  # every predictor on one line
    text, rows = printed(capsys, options), json.loads(printed(capsys, [*options, "--json"]))
    lines = [line for line in text.splitlines() if line[:2] in ("OQ", "OK", "OV")]
    for line, row in zip(lines, rows, strict=False):
        assert line.startswith(f"{row['pairing']}       {row['predictor']}")
        numbers = [
            row[name] for name in ("spearman", "within", "spec", "spec_low", "spec_high", "ap", "ap_low", "ap_high")
        ]
        found = line.replace("…", " ").split()
        assert all(f"{number:.2f}" in found for number in numbers if number is not None)


def test_a_perfect_predictor_and_a_useless_one() -> None:
    found = effects("demo", random=True, sequences=2, length=12)
    rng = np.random.default_rng(0)
    perfect = {pairing: found.of(pairing) for pairing in found.pairings}
    useless = {pairing: rng.normal(size=found.of(pairing).shape) for pairing in found.pairings}
    rows = summarise_effects(found, {"pk raw": perfect, "cs raw": useless}, resamples=50).rows()
    for row in rows:
        if row["predictor"] == "pk raw":
            assert row["spearman"] == row["within"] == pytest.approx(1) and row["ap"] == 1
            assert row["hits"] == row["largest_edges"]
        elif row["predictor"] == "cs raw":
            assert abs(row["within"]) < 0.4


def test_average_precision_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    config = FAMILIES["gpt2"].config | {"n_layer": 4}
    model = build(type(FAMILIES["gpt2"])("gpt2", config, 4))
    found = effects(model, tokens=[[5, 10, 15, 20, 25], [7, 3, 44, 3, 12]])
    predictors = predictors_of(hs.open(model), ["pk"], found.pairings)
    rows = {(r["pairing"], r["predictor"]): r for r in summarise_effects(found, predictors, resamples=10).rows()}
    for pairing in found.pairings:
        effect = found.of(pairing)
        present = ~np.isnan(effect)
        largest = effect[present] >= np.sort(effect[present])[-rows[str(pairing), "pk raw"]["largest_edges"]]
        for name in ("pk raw", "pk folded"):
            scores = predictors[name][pairing][present]
            assert rows[str(pairing), name]["ap"] == pytest.approx(metrics.average_precision_score(largest, scores))
        layers = np.array([[s.layer - t.layer for t in found.matrix(pairing).targets]
                           for s in found.matrix(pairing).sources])[present]  # fmt: skip
        expected = metrics.average_precision_score(largest, layers)  # ties share a threshold
        assert rows[str(pairing), "layer distance"]["ap"] == pytest.approx(expected)


def test_the_curve_ends_at_the_whole_effect(capsys: pytest.CaptureFixture[str]) -> None:
    curve = effects_curve("demo", "L0H3.O", "L1H0.K")
    assert curve.directions == [1, 2, 4, 8, 16, 32]
    assert curve.shared[-1] == pytest.approx(curve.whole, abs=1e-6)
    assert curve.random[-1] == pytest.approx(curve.whole, abs=1e-5)  # all that the source writes
    assert curve.shared[2] > curve.random[2]
    rows = json.loads(printed(capsys, ["pair", "demo", "L0H3.O", "L1H0.K", "--effects", "--json"]))
    assert [row["directions"] for row in rows] == curve.directions
    assert "not a forward edge" in printed(capsys, ["pair", "demo", "L1H3.O", "L0H0.K", "--effects"], 2)
    assert "is not an edge" in printed(capsys, ["pair", "demo", "L0H3.Q", "L1H0.K", "--effects"], 2)


def test_wiring_top_exports_and_figures_show_effects(
    filled: Path, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = effects_in(hs.load(filled))
    assert found is not None
    every = json.loads(printed(capsys, ["wiring", str(filled), "--pairing", "OK", "-k", "64", "--json"]))
    line = ["wiring", str(filled), "--pairing", "OK", "-k", "64", "--json"]
    large = json.loads(printed(capsys, [*line, "--large-effect"]))
    assert large == json.loads(printed(capsys, [*line, "--used"]))  # the old name
    assert len(every) == 64 and len(large) == found.large("OK").sum() and 0 < len(large) < 64
    assert all(row["large_effect"] is True and row["effect_unit"] == "total variation" for row in large)
    assert {row["source"] for row in large} >= {"L0H3"}  # the previous-token head
    mask, matrix = found.large("OK"), found.matrix("OK")
    expected = {(str(matrix.sources[i]), str(matrix.targets[j])) for i, j in zip(*np.nonzero(mask), strict=True)}
    assert {(row["source"], row["target"]) for row in large} == expected
    assert "no effects" in printed(capsys, ["wiring", str(result), "--large-effect"], 2)
    rows = json.loads(printed(capsys, ["top", str(filled), "-k", "2", "--json"]))
    assert rows[0]["effect"] == found.at("OQ", rows[0]["source"], rows[0]["target"])
    assert "effect" not in json.loads(printed(capsys, ["top", str(result), "-k", "2", "--json"]))[0]
    wired = hs.wiring(hs.load(filled), k=3)
    wired.to_csv(tmp_path / "edges.csv")
    wired.to_graphml(tmp_path / "edges.graphml")
    wired.to_json(tmp_path / "edges.json")
    table = list(csv.DictReader((tmp_path / "edges.csv").open()))
    assert float(table[0]["effect"]) == pytest.approx(wired.effect(wired.edges[0]))
    graph = (tmp_path / "edges.graphml").read_text()
    assert 'attr.name="effect"' in graph and 'attr.name="large_effect" attr.type="boolean"' in graph
    assert json.loads((tmp_path / "edges.json").read_text())["edges"][0]["effect"] == wired.effect(wired.edges[0])
    printed(capsys, ["figures", str(filled), "--only", "effects", "--out", str(tmp_path / "figures")])
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"effects-pk.png", "effects-cs.png"}


def test_the_report_opens_with_the_edges_of_large_effect(filled: Path, result: Path) -> None:
    from headspan.explorer.findings import find

    titles = [finding.title for finding in find(hs.load(filled), [], None)]
    assert any("strongest edges have a large effect" in title for title in titles)
    assert not any("large effect" in finding.title for finding in find(hs.load(result), [], None))


def test_damaged_effects_are_refused(filled: Path) -> None:
    scores = hs.load(filled)
    scores.extra["effect/random/OK"] = scores.extra["effect/random/OK"][:3]
    with pytest.raises(HeadspanError, match="damaged"):
        effects_in(scores)
    attach(scores, effects("demo", random=True, sequences=2, length=12, pairing="OQ"))  # replaces them all
    found = effects_in(scores)
    assert found is not None and [str(p) for p in found.pairings] == ["OQ"]


def test_behaviour_takes_bos(capsys: pytest.CaptureFixture[str]) -> None:
    plain, behind = (
        json.loads(printed(capsys, ["behaviour", "demo", "--sequences", "2", "--length", "9", "--bos", b, "--json"]))
        for b in ("no", "yes")
    )
    assert plain != behind
    assert "auto, yes or no" in printed(capsys, ["behaviour", "demo", "--bos", "often"], 2)
