"""The result object and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan.results.scores_file import SCHEMA, is_result
from headspan.scoring.inputs import given_scores
from headspan.scoring.run import score
from headspan.vocabulary.heads import Pairing


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    rng = np.random.default_rng(3)
    shapes = {"Q": 4, "K": 2, "V": 2, "O": 4}
    return score(hs.open({r: rng.normal(size=(3, n, 20, 4)) for r, n in shapes.items()}), ["pk", "cs"])


def test_round_trip_keeps_everything(scores: hs.Scores, tmp_path: Path) -> None:
    scores.annotations["behaviour"] = {"induction": {"L1H2": 0.5}}
    scores.save(tmp_path / "r.safetensors")
    back = hs.load(tmp_path / "r.safetensors")
    assert back.metrics == ("pk", "cs") and set(back.pairings) == set(scores.pairings)
    assert back.ports == scores.ports and back.d_model == 20
    assert back.provenance == json.loads(json.dumps(scores.provenance))
    assert back.annotations == scores.annotations
    for key in scores.arrays:
        np.testing.assert_array_equal(back[key].values, scores[key].values)
    assert is_result(tmp_path / "r.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    # Anybody can read it without headspan.
    assert load_file(tmp_path / "r.safetensors")["pk/OK"].shape == (12, 6)


def test_top_and_rank_agree(scores: hs.Scores) -> None:
    matrix = scores["pk", "OK"]
    top = matrix.top(1000)
    assert [e.score for e in top] == sorted((e.score for e in top), reverse=True)
    assert len(top) == len(matrix.pairs()[2]) == 4 * 4 + 4 * 2
    for edge in top:
        assert matrix.rank_of(edge.source, edge.target) == edge.rank
        assert matrix.at(str(edge.source), str(edge.target)) == pytest.approx(edge.score)
    assert matrix.top(0) == []
    with pytest.raises(hs.HeadspanError, match="not among the OK pairs"):
        matrix.rank_of("L2H0", "L1KV0")
    with pytest.raises(hs.HeadspanError, match="no head L9H9"):
        matrix.rank_of("L9H9", "L1KV0")


def test_ties_are_listed_in_head_order_and_share_a_rank() -> None:
    heads = tuple(hs.Head(layer, 0) for layer in range(3))
    values = np.array([[np.nan, 2, 2], [np.nan, np.nan, 5], [np.nan] * 3], dtype=np.float32)
    from headspan.results.matrix import ScoreMatrix

    matrix = ScoreMatrix("pk", Pairing.parse("OK"), heads, heads, values)
    assert [(str(e.source), str(e.target)) for e in matrix.top(3)] == [
        ("L1H0", "L2H0"),
        ("L0H0", "L1H0"),
        ("L0H0", "L2H0"),
    ]
    assert matrix.rank_of("L0H0", "L1H0") == matrix.rank_of("L0H0", "L2H0") == 2


def test_exports(scores: hs.Scores) -> None:
    frame = scores.to_pandas()
    assert list(frame.columns) == ["metric", "pairing", "source", "target", "score"]
    assert len(frame) == sum(len(scores[key].pairs()[2]) for key in scores.arrays)
    graph = scores.to_networkx("pk", ["OK"])
    edge = scores["pk", "OK"].top(1)[0]
    assert graph[str(edge.source)][str(edge.target)]["OK"]["score"] == pytest.approx(edge.score)
    assert graph.nodes[str(edge.source)]["layer"] == edge.source.layer
    data = scores.to_xarray()
    assert float(data["pk_OK"].sel(O_source=str(edge.source), K_target=str(edge.target))) == pytest.approx(edge.score)


def test_notebook_views_escape(scores: hs.Scores) -> None:
    scores.provenance["reference"] = "<img src=x>"
    assert "<img" not in scores._repr_html_() and "12 heads" in scores._repr_html_()
    assert "<table>" in scores["pk", "OK"]._repr_html_()


def test_missing_scores_are_named(scores: hs.Scores) -> None:
    with pytest.raises(hs.HeadspanError, match=r"no linear_cka scores for OK.*pk, cs"):
        scores["linear_cka", "OK"]
    assert ("pk", "OK") in scores and ("procrustes", "OK") not in scores


def rewrite(path: Path, change) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        head = json.loads(file.metadata()["headspan"])
    tensors = load_file(path)
    change(head, tensors)
    save_file(tensors, path, metadata={"headspan": json.dumps(head)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda head, tensors: head.update(schema=SCHEMA + 1), "newer headspan"),
        (lambda head, tensors: head.pop("ports"), "damaged"),
        (lambda head, tensors: head["ports"].update(Q=["L0"]), "damaged"),
        (lambda head, tensors: tensors.update({"pk/OK": np.zeros((2, 2), np.float32)}), r"shape \(2, 2\)"),
        (lambda head, tensors: tensors.update({"pk/XX": np.zeros((2, 2), np.float32)}), "unknown pairing"),
        (lambda head, tensors: head.update(d_model="many"), "damaged"),
    ],
)
def test_damaged_files_are_refused(scores: hs.Scores, tmp_path: Path, change, words: str) -> None:
    path = tmp_path / "r.safetensors"
    scores.save(path)
    rewrite(path, change)
    with pytest.raises(hs.HeadspanError, match=words):
        hs.load(path)


def test_results_of_version_0_1_load() -> None:
    """Written by headspan 0.1.0: 3 layers of 4 query heads and 2 KV heads, seed 0."""
    old = hs.load(Path(__file__).parent / "data" / "result-0.1.safetensors")
    assert old.metrics == ("pk", "cs") and list(map(str, old.pairings)) == ["OQ", "OK", "KK"]
    assert old.annotations == {"note": "kept"} and str(old.ports.kv_of("L2H3")) == "L2KV1"
    rng = np.random.default_rng(0)
    arrays = {role: rng.normal(size=(3, n, 20, 3)) for role, n in zip("QKVO", (4, 2, 2, 4), strict=True)}
    new = hs.score(hs.open(arrays), ["pk", "cs"], ["OQ", "OK", "KK"])
    for key in old.arrays:
        np.testing.assert_allclose(new[key].values, old[key].values, rtol=1e-6)


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(hs.HeadspanError, match="not a headspan result"):
        hs.load(tmp_path / "model.safetensors")
    with pytest.raises(hs.HeadspanError, match="cannot be read"):
        hs.load(tmp_path / "junk.safetensors")
    with pytest.raises(hs.HeadspanError, match="no result file"):
        hs.load(tmp_path / "absent.safetensors")
    assert not is_result(tmp_path / "junk.safetensors") and not is_result(tmp_path)


def test_given_scores_takes_results_and_models(scores: hs.Scores, tmp_path: Path) -> None:
    scores.save(tmp_path / "r.safetensors")
    assert given_scores(str(tmp_path / "r.safetensors")).d_model == 20
    assert given_scores("demo", "pk", "OK")["pk", "OK"].values.shape == (16, 16)
