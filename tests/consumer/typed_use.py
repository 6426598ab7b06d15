# pyright: strict
"""The public API as a typed program uses it: pyright and mypy check every annotation below, and the tests run it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import headspan as hs
from headspan.change.compare import Comparison
from headspan.change.diff import Diff
from headspan.checkpoints.hub.chunk_room import CachedFiles
from headspan.explorer.page import Report
from headspan.graphs.graph import Wiring
from headspan.graphs.paths import Paths
from headspan.models.opening import ModelLike
from headspan.models.weights import AttentionWeights
from headspan.paper.evaluation import Evaluation
from headspan.plotting import Drawn
from headspan.reading.info import Info
from headspan.reading.node_overlaps import NodeReport
from headspan.reading.pair import PairReport
from headspan.reading.tokens import TokenList
from headspan.results.matrix import Edges, ScoreMatrix
from headspan.results.strongest import Around
from headspan.results.tabular import Tabular
from headspan.running.effects_curve import EffectCurve
from headspan.running.effects_summary import EffectsSummary
from headspan.statistics.baseline import Baseline
from headspan.statistics.hubs import HubHead, HubLists, Hubs, HubScores
from headspan.statistics.significance import Significance

Matrix = npt.NDArray[np.float64]


class Model:
    """What a torch model looks like to a type checker."""

    config: object = None

    def state_dict(self) -> dict[str, Matrix]:
        return {}


def models(folder: Path) -> Iterator[ModelLike]:
    """Everything that opens, as `hs.open` must accept it."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Matrix] = {role: rng.normal(size=(2, 2, 8, 3)) for role in "QKVO"}
    roles: dict[hs.Role, Matrix] = {hs.Role(name): array for name, array in arrays.items()}
    listed: list[Matrix] = list(arrays.values())
    with_norm: dict[str, Matrix | str | float] = {**arrays, "gain": np.ones((2, 8)), "norm": "rms", "eps": 1e-6}
    yield from ("demo", arrays, roles, listed, tuple(listed), with_norm, hs.open("demo"), hs.fold("demo"))


def reading(folder: Path) -> None:
    for model in models(folder):
        weights: AttentionWeights = hs.open(model)
        layer: npt.NDArray[Any] = weights.read("O", 0)
        assert layer.ndim == 3
    about: Info = hs.info("demo")
    pair: PairReport = hs.pair("demo", "L0H3.O", hs.Port(hs.Head(1, 0), hs.Role.K), k=2)
    pk: float = pair.pk
    angles: npt.NDArray[Any] = pair.principal_angles
    tokens: TokenList = hs.tokens("demo", hs.Head.parse("L1H2"), "O", k=3)
    names: list[str] = [token.token for token in tokens]
    direction = hs.Node(np.ones(hs.open("demo").d_model), "all ones", layer=1)
    found: NodeReport = hs.nodes("demo", [direction], neurons="L0:0")
    assert about and pk >= 0 and len(angles) and len(names) == 3 and found.rows()


def results(folder: Path) -> hs.Scores:
    scores: hs.Scores = hs.score(
        "demo", ["pk", "cs"], nodes=hs.Node(np.ones(hs.open("demo").d_model), "all ones", layer=1)
    )
    scores = hs.score("demo", metric=["pk", "cs"], out=folder / "scores.safetensors")
    matrix: ScoreMatrix = scores["pk", "OK"]
    values: npt.NDArray[Any] = matrix.values
    edges: Edges = hs.top(scores, "OK", k=3)
    first: hs.Head | hs.Node = edges[0].source
    number: float = edges[0].score
    pairing: hs.Pairing = edges[0].pairing
    rows: list[dict[str, Any]] = edges.rows()
    array: npt.NDArray[Any] = np.asarray(matrix)
    by_layer: npt.NDArray[Any] = matrix.by_layer()
    assert array.shape == (16, 16) and by_layer.shape == (2, 8, 2, 8)
    near: Around = hs.around(scores, "L1H2", k=2)
    incoming: Edges = near.incoming
    of_method: Edges = scores.top(pairing, k=1)
    assert values.ndim == 2 and number and first.layer == 0 and rows and incoming and of_method
    return scores


def largest_cosine(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> float:
    return float(np.cos(hs.principal_angles(source, target)[0]))


def own_similarities() -> None:
    own = hs.Metric("overlap", factor=lambda weight: np.linalg.qr(weight.own)[0])
    of_pairs = hs.Metric("smallest", pair=lambda a, b: float(np.cos(hs.principal_angles(a, b)[-1])))
    one: hs.Scores = hs.score("demo", largest_cosine, "OK")
    two: hs.Scores = hs.score("demo", ["pk", own, of_pairs, largest_cosine], "OK")
    assert one["largest_cosine", "OK"] == two["largest_cosine", "OK"] and len(two.metrics) == 4


def by_keyword(scores: hs.Scores) -> None:
    """Every argument has a name, the first one too."""
    edges: Edges = hs.top(scores=scores, pairing="OK", k=3)
    near: Around = hs.around(scores=scores, head="L1H2", k=2)
    one: Hubs = hs.hubs(scores=scores, pairing="OK")
    chance: Baseline = hs.baseline(scores=scores)
    sure: Significance = hs.significance(scores=scores, pairing="OK")
    graph: Wiring = hs.wiring(scores=scores, pairing="OK", k=5)
    paths: Paths = hs.paths(scores="demo", to="L1H0.K", depth=1, k=3)
    same: Comparison = hs.compare(first=scores, second=scores)
    again: hs.Scores = hs.score(model="demo", metric="pk", pairing="OK")
    pair: PairReport = hs.pair(model="demo", source="L0H3.O", target="L1H0.K", k=2)
    tokens: TokenList = hs.tokens(model="demo", head="L1H2", role="O", k=3)
    about: Info = hs.info(model="demo")
    assert list(edges) == list(hs.top(scores, "OK", 3)) and near.rows() and one.rows() and chance.rows() and about
    assert sure.rows(k=1) and graph.edges and paths.rows() and same.rows() and again and pair and len(tokens)


def statistics(scores: hs.Scores) -> None:
    one: Hubs = hs.hubs(scores, "OK")
    inlet: HubScores = one.inlet
    best: list[HubHead] = inlet.top(2)
    by_pairing: Hubs = hs.hubs(scores, hs.Pairing(hs.Role.O, hs.Role.V))
    lists: HubLists = hs.hubs(scores, ["OQ", "OK"])
    flow: HubLists = hs.hubs(scores, "flow")
    outlet: HubScores = lists["OK"].outlet
    asked: str = "".join(["O", "K"])
    either: Hubs | HubLists = hs.hubs(scores, asked)
    chance: Baseline = hs.baseline(scores)
    sure: Significance = hs.significance(scores, "OK")
    graph: Wiring = hs.wiring(scores, "OK", k=5)
    paths: Paths = hs.paths("demo", to="L1H0.K", depth=1, k=3)
    same: Comparison = hs.compare(scores, "demo")
    assert best and by_pairing and flow and outlet and either and chance.rows() and sure.rows(k=1) and same.rows()
    assert len(graph.edges) == 5 and paths.rows()


def change(folder: Path) -> None:
    drift: Diff = hs.diff("demo", hs.open("demo"), k=2)
    other = {role: np.random.default_rng(1).normal(size=(2, 2, 8, 3)) for role in "QKVO"}
    start = {role: np.random.default_rng(0).normal(size=(2, 2, 8, 3)) for role in "QKVO"}
    series: hs.Series = hs.track([start, other], k=2)
    series.save(folder / "series.safetensors")
    again: hs.Series = hs.Series.load(folder / "series.safetensors")
    assert drift.rows() and again == series


def saving(scores: hs.Scores, folder: Path) -> None:
    loaded: Tabular = hs.load(folder / "scores.safetensors")
    rows: list[dict[str, Any]] = loaded.rows()
    assert isinstance(loaded, hs.Scores) and len(rows)
    narrowed: hs.Scores = loaded
    page: Report = hs.report(narrowed, "demo", tokens=2)
    html: str = page.html
    drawn: Drawn = hs.figures(scores, folder / "figures", "wiring", dpi=50)
    cached: CachedFiles = hs.cache("a name that no file has")
    assert html and drawn and not cached


def labels(scores: hs.Scores) -> None:
    classes: hs.Labels = hs.Labels.from_pairs(
        [("L0H0", "one"), (hs.Head(0, 1), "one"), ("L1H0", "two"), ("L1H1", "two")]
    )
    names: tuple[str, ...] = classes.names
    heads: tuple[hs.Head, ...] = classes.heads("one")
    judged: Evaluation = hs.evaluate(scores, classes, metric="pk")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", hs.HeadspanWarning)
        edges: Edges = hs.top(scores, "OK", k=1, labels=hs.Labels({hs.Head(0, 3): ("hub",)}))
        edges = hs.top(scores, "OK", k=1, labels={"L0H3": "hub", hs.Head(1, 2): ["late", "other"]})
        graph: Wiring = hs.wiring(scores, "OK", labels={"hub": [(0, 3), "L1H2"]})
        assert graph.edges
    try:
        hs.open("no/such/folder/anywhere")
    except hs.HeadspanError as error:
        text: str = str(error)
        assert text
    assert len(names) == len(heads) == 2 and judged.rows() and edges and not seen


def running(model: ModelLike) -> tuple[hs.Effects, EffectsSummary, EffectCurve]:
    """What runs a model, which the tests of effects do: here only its types are checked."""
    measured: hs.Effects = hs.effects(model, pairing="OK", sequences=2)
    values: Mapping[tuple[str, hs.Pairing], npt.NDArray[Any]] = measured.arrays
    notes: Sequence[str] = measured.notes
    assert values or notes
    return measured, hs.effects_summary(model, measured), hs.effects_curve(model, "L0H3.O", "L1H0.K")


def matrices() -> None:
    basis: npt.NDArray[Any] = hs.subspace([[1.0, 2.0], [0.0, 0.0], [2.0, 4.0]])
    shared: float = hs.projection_kernel(np.eye(3)[:, :2], np.eye(3)[:, 1:])
    angles: npt.NDArray[Any] = hs.principal_angles(basis, np.eye(3)[:, :1])
    assert basis.shape == (3, 1) and shared == 1.0 and angles.shape == (1,)


def live_models() -> list[ModelLike]:
    return [Model(), (Model(), object())]


def main(folder: Path) -> None:
    reading(folder)
    scores = results(folder)
    own_similarities()
    by_keyword(scores)
    statistics(scores)
    change(folder)
    saving(scores, folder)
    labels(scores)
    matrices()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
