"""Influence as people use it: `headspan observe`, `score`, `top` and `effects`, result files, nodes and pages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.cli import main
from headspan.models.folding import fold
from headspan.results.matrix import edge_row
from headspan.results.observations import Statistics
from headspan.statistics.influence_units import with_units
from headspan.system.atomic import write_safetensors
from headspan.system.sealed_file import KEY, read_sealed, write_sealed
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
from notices import noticed
from report_browser import Open
from report_models import payload_edges

pytest.importorskip("torch")
pytest.importorskip("transformers")

Run = Callable[..., tuple[int, str, str]]
QUICK = ["--random", "--sequences", "4", "--length", "12"]
IDS = [[5, 10, 15, 20, 9], [7, 3, 44, 3, 2], [9, 21, 33, 8, 1]]
FOLDS = "influence folds the norms"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headspan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return (code if isinstance(code, int) else 0, *capfd.readouterr())

    return call


def refused(outcome: tuple[int, str, str], words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and err.startswith("headspan: ") and words in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """random.safetensors and tokens.safetensors: statistics of the demo. r.safetensors: pk and influence."""
    found = tmp_path_factory.mktemp("influence")
    with noticed():
        hs.observe("demo", random=True, sequences=4, length=12, out=found / "random.safetensors")
    hs.observe("demo", tokens=IDS, out=found / "tokens.safetensors")
    hs.score("demo", "pk,influence", "flow", stats=found / "random.safetensors", out=found / "r.safetensors")
    return found


@pytest.fixture(scope="module")
def stats(folder: Path) -> Statistics:
    return Statistics.load(folder / "random.safetensors")


@pytest.fixture(scope="module")
def result(folder: Path) -> hs.Scores:
    return hs.Scores.load(folder / "r.safetensors")


def same(first: hs.Scores, second: hs.Scores) -> None:
    assert set(first.arrays) == set(second.arrays) and set(first.sizes) == set(second.sizes)
    for name in ("arrays", "sizes"):
        for key, values in getattr(first, name).items():
            np.testing.assert_array_equal(values, getattr(second, name)[key])


# -- headspan observe ---------------------------------------------------------------------------------------------


def test_observe_on_random_sequences(run: Run, tmp_path: Path, stats: Statistics) -> None:
    code, out, err = run("observe", "demo", *QUICK, "--out", tmp_path / "s.safetensors")
    assert (code, out) == (0, "")
    told = f"{tmp_path / 's.safetensors'}: statistics of 16 heads on 96 tokens of random sequences"
    assert err.splitlines()[-1] == told
    found = Statistics.load(tmp_path / "s.safetensors")
    assert found.inputs == stats.inputs
    for name, values in stats.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], values)


def test_observe_on_text_files(run: Run, tmp_path: Path) -> None:
    texts = ["one two three four five six seven. " * 12, "seven six five four three two one. " * 12]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    words = ["--text", tmp_path / "0.txt", "--text", tmp_path / "1.txt"]
    code, out, err = run("observe", "demo", *words, "--out", tmp_path / "s.safetensors")
    assert (code, out) == (0, ""), err
    found, expected = Statistics.load(tmp_path / "s.safetensors"), hs.observe("demo", text=texts)
    assert found.kind == "text" and found.inputs == expected.inputs
    assert err.endswith(f"on {found.tokens:,} tokens of text\n")


@pytest.mark.parametrize("ending", ["json", "npy"])
def test_observe_on_token_ids(run: Run, tmp_path: Path, folder: Path, ending: str) -> None:
    path = tmp_path / f"ids.{ending}"
    if ending == "npy":
        np.save(path, np.array(IDS))
    else:
        path.write_text(json.dumps(IDS))
    code, _, err = run("observe", "demo", "--tokens", path, "--out", tmp_path / "s.safetensors")
    assert code == 0 and err.endswith("statistics of 16 heads on 15 tokens of the given sequences\n")
    found, expected = Statistics.load(tmp_path / "s.safetensors"), Statistics.load(folder / "tokens.safetensors")
    np.testing.assert_array_equal(found.arrays["fisher/K"], expected.arrays["fisher/K"])


BAD_IDS = {
    "a.json": b"[[1, 2], [3, 4.5]]",
    "b.json": b'{"ids": [1, 2]}',
    "c.json": b"[]",
    "d.json": b"[[1, 2], [3",
    "e.json": b'[["one", "two"], ["three", "four"]]',
    "f.json": b"[" * 100_000,
    "g.json": b"[[[1, 2]], [[3, 4]]]",
    "h.json": b"[[true, false], [true, true]]",
    "i.npy": b"\x93NUMPY",
    "j.npy": b"",
    "k.json": b"\xff\xfe",
    "l.json": b"7",
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_files_without_token_ids_are_refused(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BAD_IDS[name])
    refused(run("observe", "demo", "--tokens", tmp_path / name, "--out", tmp_path / "s.safetensors"), name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "{folder}/none.json"], "there is no file"),
        (["--tokens", "{ids}", "--random"], "exclude each other"),
        (["--tokens", "{ids}", "--text", "{text}"], "exclude each other"),
        (["--random", "--text", "{text}"], "exclude each other"),
        (["--tokens", "{far}"], "ids from 0 to"),
        (["--tokens", "{one}"], "at least two"),
        (["--tokens", "{ids}", "--sequences", "3"], "--sequences"),
        (["--text", "{folder}/none.txt"], "there is no file"),
        (["--random", "--dtype", "float8"], "float8"),
        (["--random", "--out", "{folder}/s.json"], ".safetensors"),
        (["--random", "--out", "{folder}/s"], ".safetensors"),
        (["--tokens", "{same}", "--out", "{same}"], "same.safetensors"),
        (["--random", "--out", "{theirs}"], "theirs.safetensors"),
    ],
)
def test_observe_refuses_in_one_line_and_writes_nothing(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    names = {"folder": tmp_path}
    for name, content in {
        "ids.json": json.dumps(IDS), "far.json": "[[1, 2], [3, 99999999]]", "one.json": "[[1, 2, 3]]",
        "text.txt": "a b c", "same.safetensors": json.dumps(IDS), "theirs.safetensors": "not ours",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(content)
        names[name.partition(".")[0]] = tmp_path / name
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = [] if "--out" in words else ["--out", tmp_path / "new.safetensors"]
    refused(run("observe", "demo", *(word.format(**names) for word in words), *out), said)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- headspan score -----------------------------------------------------------------------------------------------


def test_score_with_statistics(run: Run, tmp_path: Path, folder: Path, result: hs.Scores) -> None:
    words = ["score", "demo", "--metric", "pk,influence", "--pairing", "flow", "--stats", folder / "random.safetensors"]
    code, out, err = run(*words, "--out", tmp_path / "r.safetensors")
    assert (code, out) == (0, "") and err.count(FOLDS) == 1
    assert err.endswith("pk, influence for 3 pairings, 384 scores\n")
    same(hs.load(tmp_path / "r.safetensors"), result)
    code, _, err = run(*words, "--fold", "--out", tmp_path / "folded.safetensors")
    assert code == 0 and FOLDS not in err
    folded = hs.load(tmp_path / "folded.safetensors")
    for pairing in ("OQ", "OK", "OV"):
        np.testing.assert_array_equal(folded["influence", pairing].values, result["influence", pairing].values)
        assert not np.array_equal(folded["pk", pairing].values, result["pk", pairing].values, equal_nan=True)


def test_score_may_observe_by_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five six seven. " * 40
    monkeypatch.setattr("headspan.running.observe.built_in_text", lambda name: text)
    words = ["score", "demo", "--metric", "influence", "--pairing", "OK", "--observe"]
    code, _, err = run(*words, "--out", tmp_path / "r.safetensors")
    assert code == 0, err
    same(hs.load(tmp_path / "r.safetensors"), hs.score("demo", "influence", "OK", stats=hs.observe("demo", text=text)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--metric influence --stats {stats} --observe", "--stats and --observe exclude each other"),
        ("--metric pk --stats {stats}", "leave out --stats"),
        ("--metric pk,cs --observe", "leave out --observe"),
        ("--metric influence", "influence needs statistics of a run"),
        ("--metric influence --stats {folder}/none.safetensors", "there is no file"),
        ("--metric influence --stats {folder}/r.safetensors", "r.safetensors"),
    ],
)
def test_score_refuses(run: Run, folder: Path, tmp_path: Path, words: str, said: str) -> None:
    given = words.format(stats=folder / "random.safetensors", folder=folder).split()
    code, out, err = run("score", "demo", *given, "--out", tmp_path / "r.safetensors")
    assert (code, out) == (2, "") and said in err.splitlines()[-1] and "`" not in err
    assert list(tmp_path.iterdir()) == []


def test_other_pairings_are_refused_with_the_reason(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["--metric", "influence", "--pairing", "QK", "--stats", folder / "random.safetensors"]
    code, _, err = run("score", "demo", *words, "--out", tmp_path / "r.safetensors")
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert err.count("\n") == 1 and err.startswith("headspan: influence is not defined for QK: ")
    assert err.endswith("Choose from OQ, OK, OV\n")


def test_all_similarities_include_influence_with_statistics_only(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["score", "demo", "--metric", "all", "--pairing", "OK"]
    for name, more in {"a": ["--stats", folder / "random.safetensors"], "b": []}.items():
        assert run(*words, *more, "--out", tmp_path / f"{name}.safetensors")[0] == 0
    having, without = (hs.load(tmp_path / f"{name}.safetensors").metrics for name in "ab")
    assert list(having) == [*without, "influence"]


# -- headspan top -------------------------------------------------------------------------------------------------


def expected(result: hs.Scores, pairing: str) -> np.ndarray:
    """By hand: folded norms subtract the mean, which leaves d − 1 dimensions."""
    assert result.provenance["statistics"]["centred"] and result.d_model == 256
    first, second = (result.sizes["influence", hs.Role(role)].astype(float) for role in pairing)
    return np.outer(first, second) / np.sqrt(255)


def test_top_has_units_and_no_z(run: Run, folder: Path, result: hs.Scores) -> None:
    rows = json.loads(run("top", folder / "r.safetensors", "--metric", "influence", "-k", 5, "--json")[1])
    assert len(rows) == 15
    columns = ["metric", "pairing", "rank", "source", "target", "score", "expected", "ratio", "amount", "unit"]
    for row in rows:
        assert list(row) == columns
        matrix = result["influence", row["pairing"]]
        place = matrix.find(row["source"], row["target"])
        assert row["score"] == matrix.values[place]
        assert row["amount"] == pytest.approx(row["score"] ** 2, rel=1e-12)
        assert row["expected"] == pytest.approx(expected(result, row["pairing"])[place], rel=1e-6)
        assert row["ratio"] == pytest.approx(row["score"] / row["expected"], rel=1e-12)
        assert row["unit"] == ("share" if row["pairing"] == "OV" else "nats")
    for pairing in ("OQ", "OK", "OV"):
        scores = [row["score"] for row in rows if row["pairing"] == pairing]
        assert scores == sorted(result["influence", pairing].pairs()[2].tolist(), reverse=True)[:5]


def test_top_beside_another_similarity(run: Run, folder: Path) -> None:
    rows = json.loads(run("top", folder / "r.safetensors", "--metric", "pk,influence", "-k", 2, "--json")[1])
    for row in rows:
        observed = row["metric"] == "influence"
        assert (row["z"] is None) == observed and (row["unit"] is not None) == observed


def test_the_table_of_influence_fits_80_columns(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("top", folder / "r.safetensors", "--metric", "influence", "-k", 3)
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80 and "…" not in out
    assert lines[1].split() == ["pairing", "rank", "source", "target", "score", "expected", "ratio", "amount", "unit"]
    assert len(lines) > 12 and lines[12].startswith("Influence on 96 tokens of random sequences.")
    assert "Influence on" not in run("top", folder / "r.safetensors", "-k", 3)[1]


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result with effects."""
    path = tmp_path_factory.mktemp("measured") / "r.safetensors"
    path.write_bytes((folder / "r.safetensors").read_bytes())
    with noticed():
        hs.effects("demo", pairing="flow", random=True, sequences=2, length=8, into=path)
    return path


@pytest.mark.parametrize("more", [[], ["--head", "L0H3"], ["--labels", "{labels}"], ["--layer", "1"]], ids=" ".join)
def test_tables_of_several_similarities_fit_80_columns(
    run: Run, folder: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """Each has its own table with its own columns; if effects make it too wide, it says what is left out."""
    (tmp_path / "l.csv").write_text("head,label\nL0H3,hub\nL1H0,ind\n")
    words = ["--metric", "pk,influence", "-k", 2, *(word.format(labels=tmp_path / "l.csv") for word in more)]
    for path in (folder / "r.safetensors", measured):
        monkeypatch.setenv("COLUMNS", "80")
        code, out, err = run("top", path, *words)
        assert code == 0 and max(map(len, out.splitlines())) <= 80 and "…" not in out, err
        assert out.startswith("largest pk scores") and "\n\nlargest influence scores" in out
        pk, influence = out.split("\n\n")
        assert " z" in pk and "ratio" not in pk and "ratio" in influence and " z " not in influence
        rows = json.loads(run("top", path, *words, "--json")[1])
        assert all(re.search(rf"\s{row['score']:.4f}\s", out) for row in rows)
        monkeypatch.setenv("COLUMNS", "200")
        wide = run("top", path, *words)[1]
        assert "Too narrow" not in wide and "expected" in wide and ("effect unit" in wide) == (path == measured)
        assert bool(re.search(r"Too narrow for [a-z_, ]*effect_unit", out)) == (path == measured)


# -- headspan effects --summary -----------------------------------------------------------------------------------


def test_the_summary_compares_influence_on_two_inputs(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    given = [word for name in ("random", "tokens") for word in ("--stats", folder / f"{name}.safetensors")]
    words = ["effects", "demo", "--summary", *given, *QUICK]
    code, out, err = run(*words, "--json")
    assert code == 0, err
    rows = json.loads(out)
    foils = [
        "influence (random)",
        "spread × sensitivity (random)",
        "influence (tokens)",
        "spread × sensitivity (tokens)",
    ]
    assert {*foils, "pk raw", "pk folded", "layer distance"} <= {row["predictor"] for row in rows}
    influence = [row for row in rows if row["predictor"] == "influence (random)"]
    assert [row["pairing"] for row in influence] == ["OQ", "OK", "OV"]
    assert all(-1 <= row["spec"] <= 1 and row["spec_low"] <= row["spec_high"] for row in influence)
    text = run(*words)[1]
    assert "influence on two inputs" in text
    assert "influence (random): statistics of 96 tokens" in text
    assert "influence (tokens): statistics of 15 tokens" in text
    scores = [
        hs.score("demo", "influence", "OK", stats=folder / f"{name}.safetensors") for name in ("random", "tokens")
    ]
    (line,) = [
        x for x in text.splitlines() if x.split()[:5] == ["OK", "influence", "(random)", "influence", "(tokens)"]
    ]
    assert line.split()[-1] == f"{hs.compare(*scores).rows()[0]['spearman']:.2f}"


def test_the_summary_observes_other_sequences_by_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Statistics] = []
    monkeypatch.setattr("headspan.running.observe.SEQUENCES", 3)
    whole = hs.observe

    def watched(*args: Any, **kwargs: Any) -> Statistics:
        seen.append(whole(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr("headspan.running.observe.observe", watched)
    code, out, err = run("effects", "demo", "--summary", "--metric", "influence", "--json", *QUICK)
    assert code == 0, err
    (found,) = seen
    assert found.kind == "random" and found.inputs[0]["sequences"] == 3
    assert "influence (random)" in {row["predictor"] for row in json.loads(out)}


def test_statistics_are_for_the_summary_only(run: Run, folder: Path) -> None:
    refused(run("effects", "demo", "--stats", folder / "random.safetensors", *QUICK), "--stats")


# -- other functions ----------------------------------------------------------------------------------------------


def test_hubs_are_sums_of_influence(result: hs.Scores) -> None:
    values = np.nan_to_num(result["influence", "OK"].forward().values.astype(float), nan=-1)
    inlet = np.zeros(values.shape[1])
    for row in values[:8]:  # the heads of layer 0, which alone write to later ones
        inlet[row.argmax()] += row.max()
    found = hs.hubs(result, "OK", "influence").inlet
    np.testing.assert_allclose(found.values[8:], inlet[8:], rtol=1e-6)
    assert found.metric == "influence" and inlet[8:].sum() > 0


def test_wiring_and_around_rank_by_influence(result: hs.Scores) -> None:
    matrix = result["influence", "OK"]
    order = sorted(matrix.pairs()[2].tolist(), reverse=True)
    edges = hs.wiring(result, "OK", k=6, metric="influence").rows()
    assert [row["score"] for row in edges] == order[:6]
    assert [row["score"] for row in edges] == [matrix.values[matrix.find(r["source"], r["target"])] for r in edges]
    rows = hs.around(result, "L1H5.K", k=3, metric="influence").rows()
    mine = matrix.values[:8, matrix.find("L0H0", "L1H5")[1]]
    assert [row["score"] for row in rows] == sorted(mine.tolist(), reverse=True)[:3]


def test_results_on_different_inputs_are_compared(folder: Path, result: hs.Scores) -> None:
    other = hs.score("demo", "influence", "flow", stats=folder / "tokens.safetensors")
    rows = hs.compare(result, other, metric="influence").rows()
    assert [row["pairing"] for row in rows] == ["OQ", "OK", "OV"]
    assert all(row["pairs"] == 64 and 0.3 < row["spearman"] < 1 for row in rows)
    assert all(
        row["spearman"] == pytest.approx(1) and row["mse"] == 0
        for row in hs.compare(result, result, metric="influence").rows()
    )


def test_evaluation_is_of_detection_only(result: hs.Scores) -> None:
    labels = hs.Labels.from_pairs([("L0H2", "a"), ("L0H3", "a"), ("L1H5", "a")])
    with pytest.warns(HeadspanWarning, match="influence .* has no classification"):
        rows = hs.evaluate(result, labels, "influence").rows()
    assert {row["task"] for row in rows} == {"detection"} and {row["metric"] for row in rows} == {"influence"}


@pytest.mark.parametrize("null", ["random", "reversed", "within"])
def test_influence_has_no_false_discovery_rate(result: hs.Scores, null: Any) -> None:
    with pytest.raises(HeadspanError, match="influence has no false-discovery rate"):
        hs.significance(result, "OK", null=null, metric="influence")
    with pytest.raises(HeadspanError, match="influence has no false-discovery rate"):
        hs.wiring(result, "OK", metric="influence", rule="significance", null=null)


@pytest.mark.parametrize("command", ["top", "hubs", "wiring", "compare demo"])
def test_commands_that_score_a_model_ask_for_a_result(run: Run, command: str) -> None:
    outcome = run(*command.split(), "demo", "--metric", "influence")
    refused(outcome, "headspan observe MODEL --out stats.safetensors")
    refused(outcome, "headspan score MODEL --metric influence --stats stats.safetensors")


def test_figures_of_a_result_with_influence_alone(stats: Statistics, tmp_path: Path) -> None:
    scores = hs.score("demo", "influence", "flow", stats=stats)
    found = hs.figures(scores, tmp_path / "made", "wiring,grid,scatter", dpi=20, k=10)
    names = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert "wiring.png" in names and "grid-influence-top10.png" in names and not any("pk" in name for name in names)
    assert list(found.skipped) == ["scatter"] and "pk and cs" in found.skipped["scatter"]
    with pytest.raises(HeadspanError) as caught:
        hs.figures(scores, tmp_path / "none", "two-layer,folded-wiring", model="demo")
    why = str(caught.value)
    assert "random weights" in why and "always uses folded" in why


def test_figures_that_influence_cannot_be_in_are_drawn_without_it(stats: Statistics, tmp_path: Path) -> None:
    scores = hs.score("demo", "linear_cka,influence", "flow", stats=stats)
    found = hs.figures(scores, tmp_path / "made", "two-layer,folded-wiring", model="demo", dpi=20)
    assert sorted(path.name for path in found.files) == ["folded-wiring-linear_cka.png", "two-layer.png"]
    assert sum("without influence" in note for note in found.notes) == 2


# -- pages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(result: hs.Scores, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("page") / "page.html"
    return path, json.loads(json.dumps(hs.report(result, out=path).payload))


def test_the_page_has_the_numbers_of_the_result(result: hs.Scores, page: tuple[Path, dict[str, Any]]) -> None:
    payload = page[1]
    (about,) = [metric for metric in payload["metrics"] if metric["key"] == "influence"]
    assert about["input"] == "96 tokens of random sequences" and about["centred"] is True
    assert {role: about["units"][role] for role in "QKV"} == {"Q": "nats", "K": "nats", "V": "share"}
    for role in "OQKV":
        np.testing.assert_allclose(about["sizes"][role], result.sizes["influence", hs.Role(role)], rtol=1e-6)
    for pairing in ("OQ", "OK", "OV"):
        edges = payload_edges(payload, "influence", pairing)
        matrix = result["influence", pairing]
        assert len(edges) == 64
        assert {ends: score for ends, (_, score) in edges.items()} == {
            ends: float(matrix.values[matrix.find(*ends)]) for ends in edges
        }
        assert payload_edges(payload, "pk", pairing) != edges


def test_the_card_of_a_pair_shows_units_and_no_z(
    result: hs.Scores, page: tuple[Path, dict[str, Any]], open_page: Open
) -> None:
    row = with_units([edge_row(result["influence", "OK"].top(1)[0])], result)[0]
    pair = f"{row['source']}.O-{row['target']}.K"
    cards = {}
    for metric in ("influence", "pk"):
        view = open_page(page[0], result, f"#metric={metric}&pairings=OK&pair={pair}")
        cards[metric] = view.text("#inspector")
    assert "Expected KL" in cards["influence"] and f"{row['ratio']:.1f} times that" in cards["influence"]
    assert f"{row['amount']:.3f} nats" in cards["influence"] and "96 tokens" in cards["influence"]
    assert "random subspaces" not in cards["influence"] and "random subspaces" in cards["pk"]


# -- nodes --------------------------------------------------------------------------------------------------------

VECTOR = np.random.default_rng(5).standard_normal(256)


def test_a_probe_reads_the_spread_of_what_heads_write(stats: Statistics) -> None:
    probe = hs.Node(VECTOR, "probe", layer=1, writes=False)
    found = hs.score("demo", "influence", "OR", stats=stats, nodes=[probe])["influence", "OR"].values[:8, 0]
    weight = fold(hs.open("demo")).read("O", 0).astype(float)
    read = np.einsum("hdm,d->hm", weight, VECTOR)
    spread = stats.arrays["spread/O"][:8].astype(float)
    np.testing.assert_allclose(found, np.sqrt(np.einsum("hm,hmk,hk->h", read, spread, read)), rtol=1e-5)


def test_what_a_node_writes_needs_its_variance(stats: Statistics) -> None:
    node = hs.Node(VECTOR, "steering", layer=1)
    with noticed() as said:
        scores = hs.score("demo", "influence", "WK,OR", stats=stats, nodes=[node])
    assert [str(pairing) for _, pairing in scores.arrays] == ["OR"]
    assert any("WK" in text and "variance of what steering writes" in text for text in said)
    with pytest.raises(HeadspanError, match=r"WK, WQ, WV: .*variance of what steering"):
        hs.score("demo", "influence", "WK", stats=stats, nodes=[hs.Node(VECTOR, "steering", layer=1, reads=False)])


def test_influence_of_what_a_node_writes(stats: Statistics) -> None:
    node = hs.Node(VECTOR, "steering", layer=1, variance=4.0)
    scores = hs.score("demo", "influence", "WK", stats=stats, nodes=[node])
    weight = fold(hs.open("demo")).read("K", 1).astype(float)
    read = np.einsum("hdm,d->hm", weight, VECTOR)
    fisher = stats.arrays["fisher/K"][8:].astype(float)
    by_hand = 2 * np.sqrt(np.einsum("hm,hmk,hk->h", read, fisher, read))
    np.testing.assert_allclose(scores["influence", "WK"].values[0, 8:], by_hand, rtol=1e-5)
    louder = hs.Node(VECTOR, "steering", layer=1, variance=9.0)
    hashes = [
        hs.score("demo", "pk", "WK", nodes=[one]).provenance["nodes_hash"]
        for one in (node, louder, hs.Node(VECTOR, "steering", layer=1), node)
    ]
    assert len(set(hashes)) == 3 and hashes[0] == hashes[3]


@pytest.mark.parametrize("variance", [0, -1.0, float("nan"), float("inf"), "4", True, [4.0]])
def test_impossible_variances_are_refused(variance: Any) -> None:
    with pytest.raises(HeadspanError, match="variance of x"):
        hs.Node(VECTOR, "x", variance=variance)


def test_a_node_that_only_reads_has_no_variance() -> None:
    with pytest.raises(HeadspanError, match="x does not write"):
        hs.Node(VECTOR, "x", writes=False, variance=1.0)


# -- result files -------------------------------------------------------------------------------------------------


def test_a_result_file_keeps_sizes(folder: Path, stats: Statistics, result: hs.Scores, tmp_path: Path) -> None:
    with noticed():
        same(hs.score("demo", "pk,influence", "flow", stats=stats), result)
    result.save(tmp_path / "again.safetensors")
    same(hs.load(tmp_path / "again.safetensors"), result)


def without(tensors: dict[str, np.ndarray], name: str) -> None:
    del tensors[name]


EDITS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "missing": (lambda t: without(t, "size/influence/K"), "influence/OK without the sizes"),
    "negative": (lambda t: t["size/influence/K"].__setitem__(3, -1), "negative or missing sizes"),
    "nan": (lambda t: t["size/influence/O"].__setitem__(0, np.nan), "size/influence/O"),
    "short": (lambda t: t.update({"size/influence/O": t["size/influence/O"][:-1].copy()}), "size/influence/O"),
    "too small": (lambda t: t["size/influence/O"].fill(1e-9), "outside the range of influence"),
    "too large": (lambda t: t["influence/OK"].__setitem__((0, 9), 1e4), "outside the range of influence"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path, edit: str) -> None:
    change, said = EDITS[edit]
    head, tensors = read_sealed(folder / "r.safetensors", "result", "there is no result")
    tensors = {name: np.array(values) for name, values in tensors.items()}
    change(tensors)
    write_sealed(tmp_path / "r.safetensors", tensors, head)
    with pytest.raises(HeadspanError, match=said):
        hs.load(tmp_path / "r.safetensors")


def test_an_edited_size_is_reported(folder: Path, tmp_path: Path) -> None:
    """One that could be true, in a file with the hash of the true one."""
    head, tensors = read_sealed(folder / "r.safetensors", "result", "there is no result")
    tensors = {name: np.array(values) for name, values in tensors.items()}
    tensors["size/influence/K"] *= 2
    write_safetensors(tmp_path / "r.safetensors", tensors, {KEY: json.dumps(head)})
    with pytest.warns(HeadspanWarning, match="its hash"):
        assert hs.load(tmp_path / "r.safetensors").provenance["altered"]
