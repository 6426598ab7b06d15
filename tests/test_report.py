"""What a report holds: its numbers are those of the result, and nothing in it can do harm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.explorer.encode import Limits
from headspan.explorer.page import Report
from headspan.explorer.report import report
from headspan.graphs.selection import wiring
from headspan.models.weights import AttentionWeights
from headspan.results.labels import Labels
from headspan.results.scores import Scores
from headspan.statistics.hubs import hubs
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS
from report_models import HOSTILE, array_model, payload_edges, synthetic_scores, unpack

Made = tuple[AttentionWeights, Scores, Report]


@pytest.fixture(scope="module", params=[4, 2], ids=["all heads their own K and V", "two heads share K and V"])
def made(request: pytest.FixtureRequest) -> Made:
    weights = array_model(kv_heads=request.param)
    scores = hs.score(weights)
    return weights, scores, report(scores, weights, labels=Labels.from_pairs([("L0H1", "writer"), ("L2H0", "reader")]))


def payload_of(html: str) -> dict:
    """The payload as a browser would read it from the file."""
    text = re.search(r'<script type="application/json" id="payload">(.*?)</script>', html, re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_the_file_holds_the_payload(made: Made) -> None:
    _, _, page = made
    assert payload_of(page.html) == json.loads(json.dumps(page.payload))


def test_kept_edges_are_those_of_the_result(made: Made) -> None:
    _, scores, page = made
    for metric, pairing in scores.arrays:
        matrix = scores[metric, pairing]
        kept = payload_edges(page.payload, metric, str(pairing))
        for (source, target), (rank, score) in kept.items():
            assert score == matrix.at(source, target)
            assert rank == matrix.rank_of(source, target)


@pytest.mark.parametrize("rule", ["top", "top-per-target"])
def test_kept_edges_suffice_for_the_edge_rules(rule: str) -> None:
    scores = synthetic_scores(8, 10)
    page = report(scores)
    limits = Limits.of(scores)
    k = limits.overall if rule == "top" else limits.per_head
    for edge in wiring(scores, "flow", k=k, rule=rule).edges:  # type: ignore[arg-type]
        rank, score = payload_edges(page.payload, "pk", str(edge.pairing))[str(edge.source), str(edge.target)]
        assert (rank, score) == (edge.rank, edge.score)


def test_every_head_keeps_its_best_partners() -> None:
    scores = synthetic_scores(8, 10)
    page = report(scores)
    for pairing in FLOW_PAIRINGS:
        matrix = scores["pk", pairing]
        kept = payload_edges(page.payload, "pk", str(pairing))
        for i, source in enumerate(matrix.sources):
            if np.isnan(matrix.values[i]).all():
                continue
            assert (str(source), str(matrix.targets[int(np.nanargmax(matrix.values[i]))])) in kept


@pytest.mark.parametrize(("layers", "heads", "coarse"), [(2, 8, "f4"), (8, 10, "u2"), (20, 16, "u1")])
def test_matrices_are_exact_or_close(layers: int, heads: int, coarse: str) -> None:
    scores = synthetic_scores(layers, heads)
    page = report(scores)
    for metric, pairing in (("pk", "OK"), ("cs", "QQ")):
        raw = page.payload["matrices"][f"{metric}/{pairing}"]
        encoding = "f4" if metric == "pk" and coarse == "u2" else coarse
        assert raw["encoding"] == encoding
        values = scores[metric, pairing].pairs()[2]
        stored = unpack(raw["data"], encoding)
        if encoding == "f4":
            np.testing.assert_array_equal(stored, values)
            continue
        step = (raw["high"] - raw["low"]) / {"u2": 65535, "u1": 255}[encoding]
        np.testing.assert_allclose(raw["low"] + step * stored, values, atol=0.51 * step)


def test_more_similarities_do_not_make_the_first_coarser() -> None:
    scores = hs.score(array_model(12, 12, 12), ["pk", "cs"])
    more = {("x" + str(i), p): v for i in range(4) for (m, p), v in scores.arrays.items() if m == "pk"}
    many = Scores({**scores.arrays, **more}, scores.ports, scores.d_model, scores.role_ranks, scores.provenance)
    payload = report(many).payload
    assert payload["matrices"]["cs/OK"]["encoding"] == payload["matrices"]["x0/OK"]["encoding"] == "u1"
    for pairing in scores.pairings:
        raw = payload["matrices"][f"pk/{pairing}"]
        assert raw["encoding"] == "f4"
        np.testing.assert_array_equal(unpack(raw["data"], raw["encoding"]), scores["pk", pairing].pairs()[2])


def test_nothing_reveals_the_authors_machine(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "models"
    folder.mkdir(parents=True)
    labels = folder / "mine.csv"
    labels.write_text("head,label\nL0H1,writer\nL2H0,reader\n")
    weights = array_model()
    scores = hs.score(weights)
    scores.provenance["reference"] = str(folder / "model")
    scores.provenance["tensors"] = [f"{folder}/a.safetensors", "of ~/secret/x/y.bin and org/name"]
    page = report(scores, weights, labels=str(labels))
    assert "secret" not in page.html and str(tmp_path) not in page.html
    assert page.payload["model"]["name"] == page.payload["model"]["reference"] == "model"
    assert page.payload["labels"]["source"] == "mine.csv"
    assert "org/name" in page.html


def test_other_pair_sets_are_kept_too() -> None:
    scores = hs.score(array_model(), metric="pk", pairing="OK", pairs="all")
    raw = report(scores).payload["matrices"]["pk/OK"]
    bits = np.unpackbits(unpack(raw["bits"], "u1"), bitorder="little")[: 16 * 16].astype(bool).reshape(16, 16)
    np.testing.assert_array_equal(bits, ~np.isnan(scores["pk", "OK"].values))
    np.testing.assert_array_equal(unpack(raw["data"], "f4"), scores["pk", "OK"].values[bits])


def test_hubs_and_distributions_are_those_of_the_library(made: Made) -> None:
    _, scores, page = made
    for pairing in FLOW_PAIRINGS:
        stored = unpack(page.payload["hubs"][f"pk/{pairing}"]["outlet"], "f4")
        np.testing.assert_array_equal(stored, hubs(scores, pairing).outlet.values.astype(np.float32))
    line = page.payload["distributions"]["OK"]
    values = scores["pk", "OK"].forward().pairs()[2]
    assert sum(line["counts"]) == line["pairs"] == len(values)
    assert line["mean"] == pytest.approx(values.mean(dtype=np.float64))


def test_the_planted_pair_opens_the_report(made: Made) -> None:
    weights, scores, page = made
    target = "L2KV0" if weights.n_kv_heads < weights.n_heads else "L2H0"
    first = page.payload["findings"][0]
    assert first["title"] == f"L0H1 writes what the keys of {target} read"
    assert f"{scores['pk', 'OK'].at('L0H1', target):.1f} of 4" in first["text"]
    assert first["view"]["pair"] == f"L0H1.O-{target}.K"
    assert 3 <= len(page.payload["findings"]) <= 5


def test_angles_add_up_to_the_kernel(made: Made) -> None:
    _, scores, page = made
    matrix = scores["pk", "OK"]
    details = page.payload["details"]["OK"]
    assert details
    for key, entry in details.items():
        row, column = map(int, key.split(">"))
        cosines = np.cos(unpack(entry["angles"], "u2") * (np.pi / 2 / 65535))
        assert np.square(cosines).sum() == pytest.approx(matrix.values[row, column], abs=1e-3)


def test_tokens_are_those_of_the_library(made: Made) -> None:
    from headspan.reading.tokens import tokens as head_tokens

    weights, _, page = made
    expected = [token.token for token in head_tokens(weights, "L1H2", "O", k=10)]
    assert page.payload["tokens"]["O"]["L1H2"] == expected


def test_labels_of_query_heads_reach_shared_heads(made: Made) -> None:
    weights, _, page = made
    if weights.n_kv_heads < weights.n_heads:
        assert page.payload["labels"]["heads"]["L0KV0"] == ["writer"]
    assert page.payload["evaluation"]["detection"]


def test_a_page_from_a_result_alone_lists_what_is_missing(made: Made) -> None:
    _, scores, _ = made
    payload = report(scores).payload
    assert payload["tokens"] is None
    assert payload["details"] is None
    assert "from the model" in payload["missing"]["tokens"]
    assert payload["evaluation"] is None


def test_one_metric_one_pairing_one_layer() -> None:
    payload = report(hs.score(array_model(layers=1), metric="cs", pairing="QQ")).payload
    assert [m["key"] for m in payload["metrics"]] == ["cs"]
    assert payload["distributions"] == {}
    assert payload["hub_pairings"] == []
    assert payload["findings"] == [] and not payload["above_chance"], "random weights, and no planted pair among these"


def test_weights_of_another_model_are_refused(made: Made) -> None:
    _, scores, _ = made
    with pytest.raises(HeadspanError, match=r"it has 16 heads, d_model 32, .*d_model 24"):
        report(scores, array_model(d=32))
    with pytest.raises(HeadspanError, match="made from"):
        report(hs.score(array_model(kv_heads=4)), array_model(m=5))


def test_unknown_labels_are_one_message(made: Made) -> None:
    with pytest.raises(HeadspanError, match="no labels 'nothing'"):
        report(made[1], labels="nothing")


def test_behaviour_is_taken_from_the_result(made: Made) -> None:
    _, scores, _ = made
    annotated = Scores(scores.arrays, scores.ports, scores.d_model, scores.role_ranks, scores.provenance)
    annotated.annotations["behaviour"] = {"induction": {"L1H2": 0.75, "L0H0": float("nan")}, "note": "ignored"}
    assert report(annotated).payload["behaviour"] == {"induction": {"L1H2": 0.75}}


# ---------------------------------------------------------------------- safety


def test_hostile_names_stay_data() -> None:
    scores = synthetic_scores(2, 2, reference=HOSTILE)
    page = report(scores, labels=Labels.from_pairs([("L0H0", HOSTILE), ("L1H0", HOSTILE)]))
    assert "<img" not in page.html
    assert page.html.count("</script>") == 2
    assert "\u2028" not in page.html.split('id="payload"')[1]
    assert payload_of(page.html)["labels"]["heads"]["L0H0"] == [HOSTILE]


def test_the_policy_allows_exactly_what_is_in_the_page(made: Made) -> None:
    html = made[2].html
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in unescape(policy[1]).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"


def test_the_scripts_never_turn_data_into_markup() -> None:
    static = Path(hs.__file__).parent / "explorer" / "static"
    scripts = list(static.glob("*.js"))
    assert len(scripts) >= 10
    for path in scripts:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        assert text.count("\n") < 350


# ------------------------------------------------------------ file and notebook


def test_the_page_is_written_whole(made: Made, tmp_path: Path) -> None:
    _, scores, _ = made
    page = report(scores, path=tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == page.html
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_notebook_shows_it_in_a_sandbox(made: Made) -> None:
    shown = made[2].show()._repr_html_()
    assert shown.startswith("<iframe")
    assert "allow-same-origin" not in shown
    source = re.search(r'srcdoc="([^"]*)"', shown)
    assert source is not None
    assert unescape(source[1]) == made[2].html


def test_a_notebook_shows_a_light_preview(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, scores, page = made
    shown = page._repr_html_()
    assert len(shown) < 80_000 and "<iframe" not in shown and "<script" not in shown
    assert "data:image/svg+xml;base64," in shown and ".save(" in shown and ".show()" in shown
    assert page.payload["findings"][0]["title"] in unescape(shown)
    monkeypatch.chdir(tmp_path)
    scores.provenance["reference"] = "<img src=x onerror=y>"
    page = report(scores, path="a page.html")
    shown = page._repr_html_()
    assert 'href="a%20page.html"' in shown and ".save(" not in shown and "<img src=x" not in shown
    (tmp_path / "a page.html").unlink()
    assert ".save(" in page._repr_html_()
    page.save(tmp_path.parent / "other.html")
    assert f'href="{(tmp_path.parent / "other.html").as_uri()}"' in page._repr_html_()
    change = hs.report(hs.diff("demo", "demo"))._repr_html_()
    assert "demo → demo" in change and "weights that moved" in change and len(change) < 3_000


def test_command(tmp_path: Path) -> None:
    run = CliRunner()
    out, result = tmp_path / "demo.html", tmp_path / "demo.safetensors"
    done = run.invoke(app, ["report", "demo", "--out", str(out), "--metrics", "pk", "--pairings", "flow"])
    assert done.exit_code == 0, done.output
    assert payload_of(out.read_text(encoding="utf-8"))["pairings"] == ["OQ", "OK", "OV"]
    hs.score(hs.open("demo"), metric="pk").save(result)
    done = run.invoke(app, ["report", str(result), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert payload_of(out.read_text(encoding="utf-8"))["details"] is None
    done = run.invoke(app, ["report", str(result), "--weights", "demo", "--tokens", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert payload_of(out.read_text(encoding="utf-8"))["details"]
    habits = tmp_path / "behaviour.json"
    habits.write_text(json.dumps({"induction": {"L1H2": 0.5, "L0H0": None}}))
    done = run.invoke(app, ["report", str(result), "--behaviour", str(habits), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert payload_of(out.read_text(encoding="utf-8"))["behaviour"] == {"induction": {"L1H2": 0.5}}
    assert isinstance(run.invoke(app, ["report", str(result), "--behaviour", str(out)]).exception, HeadspanError)
    assert isinstance(run.invoke(app, ["report", "demo", "--labels", "nothing"]).exception, HeadspanError)
    assert isinstance(run.invoke(app, ["report", str(result), "--fold"]).exception, HeadspanError)


@pytest.mark.slow
def test_a_thousand_heads_stay_under_ten_megabytes(large_page: Path) -> None:
    assert (large_page / "page.html").stat().st_size < 10e6
    payload = json.loads((large_page / "payload.json").read_text("utf-8"))
    kinds = {key: raw["pairs"] for key, raw in payload["matrices"].items()}
    assert {kinds[f"{m}/{p}"] for m in ("pk", "cs") for p in ("OQ", "OK", "OV")} == {"forward"}
    assert kinds["cs/QK"] == "layers"


def test_gpt2_stays_under_three_megabytes(gpt2_page: Path) -> None:
    assert (gpt2_page / "page.html").stat().st_size < 3e6
    payload = json.loads((gpt2_page / "payload.json").read_text("utf-8"))
    assert payload["findings"][0]["title"] == "L4H11 writes what the keys of L5H1 read"
    detection = payload["evaluation"]["detection"][0]
    assert detection["average"] == pytest.approx(0.395, abs=6e-4)
