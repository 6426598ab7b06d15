"""Results as other Python tools take them: arrays, [layer, head, layer, head], networkx graphs, labels as a dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.results.labels import Labels

Grouped = tuple[hs.Scores, dict[str, Any]]


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    return hs.score("demo", "pk")


@pytest.fixture(scope="module")
def grouped() -> Grouped:
    """Scores of six query heads and two key/value heads in each of three layers, and their weights."""
    rng = np.random.default_rng(0)
    given = {role: rng.normal(size=(3, n, 24, 3)) for role, n in zip("QKVO", (6, 2, 2, 6), strict=True)}
    return hs.score(given, "pk"), given


# -- arrays --------------------------------------------------------------------------------------------------


def test_a_matrix_is_an_array(scores: hs.Scores) -> None:
    matrix = scores["pk", "OK"]
    assert np.asarray(matrix) is matrix.values
    copied = np.array(matrix)
    assert copied is not matrix.values and not np.shares_memory(copied, matrix.values)
    wide = np.asarray(matrix, dtype=np.float64)
    assert wide.dtype == np.float64 and np.array_equal(wide, matrix.values, equal_nan=True)
    assert np.nanmax(matrix) == matrix.top(1)[0].score
    assert np.array(matrix, copy=False) is matrix.values
    with pytest.raises(ValueError, match="without a copy"):
        np.array(matrix, dtype=np.float64, copy=False)


@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "QK", "KK", "VO"])
def test_by_layer_of_multi_head_attention_only_changes_the_shape(scores: hs.Scores, pairing: str) -> None:
    found, matrix = scores["pk", pairing].by_layer(), scores["pk", pairing]
    assert found.shape == (2, 8, 2, 8)
    np.testing.assert_array_equal(found.reshape(16, 16), matrix.values)
    assert not np.shares_memory(found, matrix.values)


@pytest.mark.parametrize("pairing", ["OQ", "OK", "OV", "QK", "KK", "VQ"])
def test_by_layer_counts_query_heads_under_gqa(grouped: Grouped, pairing: str) -> None:
    """As with the repeated keys and values of TransformerLens: the kernel of each pair of query heads by definition."""
    result, weights = grouped
    found = result["pk", pairing].by_layer()
    assert found.shape == (3, 6, 3, 6)
    first, second = (np.repeat(weights[role], 3 if role in "KV" else 1, axis=1) for role in pairing)
    present = 0
    for layer, head, target_layer, target in np.argwhere(~np.isnan(found)):
        expected = hs.projection_kernel(first[layer, head], second[target_layer, target])
        assert found[layer, head, target_layer, target] == pytest.approx(expected, rel=1e-5)
        present += 1
    each = np.prod([3 if role in "KV" else 1 for role in pairing])
    assert present == each * len(result["pk", pairing].pairs()[2])


def test_by_layer_has_a_place_for_layers_without_attention(tmp_path: Path) -> None:
    from families import FAMILIES, build

    build(FAMILIES["jamba"]).save_pretrained(tmp_path)
    with pytest.warns(hs.HeadspanWarning):
        matrix = hs.score(tmp_path, "pk", "OQ", "all")["pk", "OQ"]
    layers = sorted({head.layer for head in matrix.sources})
    found = matrix.by_layer()
    assert len(layers) < layers[-1] + 1 == len(found)
    without = [layer for layer in range(len(found)) if layer not in layers]
    assert np.isnan(found[without]).all() and np.isnan(found[:, :, without]).all()
    for edge in matrix.top(20):
        at = edge.source.layer, edge.source.index, edge.target.layer, edge.target.index  # type: ignore[union-attr]
        assert found[at] == np.float32(edge.score)


def test_by_layer_refuses_what_is_no_grid() -> None:
    from headspan.results.matrix import ScoreMatrix

    heads = (hs.Head(0, 0), hs.Head(1, 0), hs.Head(1, 1))
    with pytest.raises(hs.HeadspanError, match=r"layers have 1 to 2 heads\. Use values"):
        ScoreMatrix("pk", hs.Pairing.parse("OQ"), heads, heads, np.zeros((3, 3))).by_layer()
    probe = hs.Node(np.ones(hs.open("demo").d_model), "probe", layer=1)
    with_probe = hs.score("demo", "pk", "OK", nodes=probe)
    with pytest.raises(hs.HeadspanError, match="probe is not a head"):
        with_probe["pk", "OR"].by_layer()
    assert with_probe["pk", "OK"].by_layer().shape == (2, 8, 2, 8)


def test_by_layer_refuses_rotary_key_heads(tmp_path: Path) -> None:
    from families import build
    from test_latent import LATENT

    build(LATENT["deepseek_v2"]).save_pretrained(tmp_path)
    with pytest.warns(hs.HeadspanWarning):
        scores = hs.score(tmp_path, "pk", ["OK", "OV"])
    with pytest.raises(hs.HeadspanError, match=r"the K include L0KR"):
        scores["pk", "OK"].by_layer()
    assert scores["pk", "OV"].by_layer().ndim == 4


# -- graphs --------------------------------------------------------------------------------------------------


def test_all_edges_have_the_same_attributes(grouped: Grouped, tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    for graph, names in (
        (grouped[0].to_networkx(), {"pairing", "score"}),
        (hs.wiring(grouped[0], k=9).to_networkx(), {"metric", "pairing", "rank", "score"}),
    ):
        edges = list(graph.edges(keys=True, data=True))
        assert {frozenset(fields) for *_, fields in edges} == {frozenset(names)}
        assert all(fields["pairing"] == key for *_, key, fields in edges)
        assert {key for *_, key, fields in edges if np.isnan(fields["score"])} == {"serves"}
        networkx.write_graphml(graph, tmp_path / "graph.graphml")
        again = networkx.read_graphml(tmp_path / "graph.graphml")
        assert again.number_of_edges() == len(edges)


# -- labels --------------------------------------------------------------------------------------------------

DICTS: dict[str, dict[Any, Any]] = {
    "heads": {"L0H3": "previous", "L1H0": ["induction", "late"]},
    "classes": {"previous": ["L0H3"], "induction": [(1, 0)], "late": {hs.Head(1, 0)}},
    "tuples": {(0, 3): "previous", (np.int64(1), 0): ("induction", "late")},
    "objects": {hs.Head(0, 3): ["previous"], hs.Head(1, 0): ("induction", "late")},
}


@pytest.mark.parametrize("given", DICTS)
def test_labels_as_a_dict(given: str, scores: hs.Scores, tmp_path: Path) -> None:
    right = Labels.from_pairs([("L0H3", "previous"), ("L1H0", "induction"), ("L1H0", "late")])
    labels = DICTS[given]
    assert Labels.from_dict(labels) == right == Labels(labels)
    assert hs.top(scores, "OK", 3, labels=labels).rows() == hs.top(scores, "OK", 3, labels=right).rows()
    assert hs.wiring(scores, labels=labels).node("L1H0").labels == ("induction", "late")
    assert hs.evaluate(scores, labels) == hs.evaluate(scores, right)
    assert hs.report(scores, labels=labels).payload == hs.report(scores, labels=right).payload
    hs.figures(scores, tmp_path, "wiring", labels=labels, dpi=40)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"previous": "L0H3"}, r"'previous' is not a head"),
        ({"L0H3": "previous", "induction": ["L1H0"]}, r"'induction' is not a head"),
        ({"L9H9": "previous"}, r"this model does not have: L9H9"),
        ({"L0H3": 3}, r"a class, a list of classes or a list of heads"),
        ({"previous": ["somewhere"]}, r"'somewhere' is not a head name"),
        ({"L0H3": [3]}, r"a class, a list of classes or a list of heads"),
        ({3: ["L0H3"]}, r"a class, a list of classes or a list of heads"),
        (5, r"labels must be labels .*a mapping"),
    ],
)
def test_wrong_dicts_are_refused(wrong: Any, said: str, scores: hs.Scores) -> None:
    with pytest.raises(hs.HeadspanError, match=said):
        hs.top(scores, "OK", 3, labels=wrong)
