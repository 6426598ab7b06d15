"""Do weights help to find a task's circuit? Rankings of edges compared by the circuits that they give.

    python benchmarks/task_evidence.py MODEL TASK OUT.json [--prompts 16] [--draws 12] [--parts curves,few,heads]

For one model and task, on held-out prompts:

- all edges: CPR and CMD of circuits by EAP, EAP-IG and at random;
- edges between heads (all others kept): the same by PK, CS, influence on generic text, EAP, EAP-IG, PK × |EAP|, and a
  placebo, PK permuted inside layer pairs × |EAP|;
- five prompts only (part `few`): circuits from disjoint draws of five prompts, with PK, the placebo or neither as a
  prior: their faithfulness, the Jaccard index of pairs of draws, and what PK adds with a 95 % jackknife interval;
- overlap against task (part `heads`): how many of the edges with the largest exact values are in the top 1 % of each
  similarity, and detection areas of all similarities on the heads of the best edges (200, at most a tenth of all).

OUT.json is updated part by part, so a run that stopped can continue with the others.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

import headspan as hs
from headspan.results.tasks.task_result import SHARES, on_edges
from headspan.running.opening import running
from headspan.running.tasks.graph_model import GraphModel
from headspan.running.tasks.measuring import Faithfulness, Measuring
from headspan.running.tasks.prompts import task_prompts
from headspan.vocabulary.heads import layers_of

GOAL = "logit-difference"
FEW = 5
KEPT = 0.02  # share of the edges between heads that circuits of few prompts keep
CIRCUIT = 200  # edges whose heads are the class to detect, at most a tenth of all


def permuted(values: np.ndarray, graph: GraphModel, rng: np.random.Generator) -> np.ndarray:
    """Values shuffled among the edges of the same pairing between the same two layers."""
    table, found = graph.table, values.copy()
    source = layers_of([port.head for port in table.writers])
    target = layers_of([port.head for port in table.readers])
    roles = np.array([str(port.role) for port in table.readers])
    rows, columns = np.nonzero(table.between_heads)
    keys = np.stack([source[rows], target[columns], np.unique(roles[columns], return_inverse=True)[1]])
    order = np.lexsort(keys)
    rows, columns, keys = rows[order], columns[order], keys[:, order]
    starts = np.flatnonzero(np.r_[True, (np.diff(keys, axis=1) != 0).any(0)])
    for start, stop in zip(starts, np.r_[starts[1:], len(rows)], strict=True):
        place = rows[start:stop], columns[start:stop]
        found[place] = rng.permutation(values[place])
    return found


class Heads:
    """Circuits of edges between heads, with every other edge kept."""

    def __init__(self, faithfulness: Faithfulness, graph: GraphModel) -> None:
        self.of, self.mask = faithfulness.of, graph.table.between_heads
        self.others = graph.table.mask & ~self.mask
        self.nothing = self.of(self.others)

    def kept(self, ranking: np.ndarray, share: float) -> np.ndarray:
        flat = np.flatnonzero(self.mask)
        best = flat[np.argsort(-np.abs(ranking.ravel()[flat]), kind="stable")[: max(1, round(share * len(flat)))]]
        kept = np.zeros(self.mask.size, dtype=bool)
        kept[best] = True
        return kept.reshape(self.mask.shape)

    def faithfulness(self, ranking: np.ndarray, share: float) -> float:
        """1 with all edges between heads, 0 with none of them."""
        found = self.of(self.others | self.kept(ranking, share))
        return (found - self.nothing) / (1 - self.nothing)

    def areas(self, ranking: np.ndarray) -> dict[str, float]:
        curve = [1.0 if share == 1 else self.faithfulness(ranking, share) for share in SHARES]
        return {**areas(curve), "curve": curve}  # type: ignore[dict-item]


def areas(curve: list[float]) -> dict[str, float]:
    values = np.array(curve)
    return {"cpr": float(np.trapezoid(values, SHARES)), "cmd": float(np.trapezoid(np.abs(1 - values), SHARES))}


def whole(faithfulness: Faithfulness, ranking: np.ndarray) -> dict[str, Any]:
    curve = [point["faithfulness"] for point in faithfulness.curve(ranking)]
    return {**areas(curve), "curve": curve}


def curves(model: str, task: str, count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        given = task_prompts(ready, task, count=count, seed=0)
        found: dict[str, Any] = {"model": model, "task": task, "prompts": len(given.prompts)}
        mean = {}
        for method in ("eap", "ig"):
            measuring = Measuring(graph, GOAL, method, 2**31, lambda: None)
            each, clean, _ = measuring.attributions(given.prompts)
            mean[method] = each.mean(0)
        held = Faithfulness(measuring, given.held_out)
        found["values"], found["solved"] = held.values, float((clean > 0).mean())
        random = rng.random(graph.table.mask.shape)
        found["all edges"] = {
            n: whole(held, r) for n, r in {"EAP": mean["eap"], "EAP-IG": mean["ig"], "random": random}.items()
        }
        of = similarities(model, ready, graph)
        heads = Heads(held, graph)
        found["without edges between heads"] = heads.nothing
        placebo = permuted(of["pk"], graph, rng)
        rankings = {
            "random": random, "pk": of["pk"], "cs": of["cs"], "influence": of["influence"], "EAP": mean["eap"],
            "EAP-IG": mean["ig"], "pk × |EAP|": of["pk"] * np.abs(mean["eap"]),
            "placebo × |EAP|": placebo * np.abs(mean["eap"]),
            "influence × |EAP|": of["influence"] * np.abs(mean["eap"]),
        }  # fmt: skip
        found["edges between heads"] = {name: heads.areas(ranking) for name, ranking in rankings.items()}
    return found


def similarities(model: str, ready: Any, graph: GraphModel) -> dict[str, np.ndarray]:
    scores = hs.score(model, ["pk", "cs"], "flow")
    influence = hs.score(model, "influence", "flow", stats=hs.observe(ready))
    of = {name: on_edges(scores, name, graph.table)[name] for name in ("pk", "cs")}
    of["influence"] = on_edges(influence, "influence", graph.table)["influence"]
    return {name: np.nan_to_num(values) for name, values in of.items()}


def few(model: str, task: str, count: int, draws: int) -> dict[str, Any]:
    """Circuits of five prompts: with a prior, with a placebo, and without. No prompt is in two draws."""
    rng = np.random.default_rng(0)
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        given = task_prompts(ready, task, count=draws * FEW, seed=0)
        measuring = Measuring(graph, GOAL, "ig", 2**31, lambda: None)
        each, _, _ = measuring.attributions(given.prompts)
        heads = Heads(Faithfulness(measuring, given.held_out[:count]), graph)
        scores = hs.score(model, "pk", "flow")
        pk = np.nan_to_num(on_edges(scores, "pk", graph.table)["pk"])
        sizes = [np.abs(each[i * FEW : (i + 1) * FEW].mean(0)) for i in range(draws)]
        rankings = {
            "EAP-IG": sizes,
            "pk × |EAP-IG|": [pk * size for size in sizes],
            "placebo × |EAP-IG|": [permuted(pk, graph, rng) * size for size in sizes],
        }
        found: dict[str, Any] = {"draws": draws, "faithfulness": {}, "jaccard": {}}
        for name, of in rankings.items():
            kept = [heads.kept(ranking, KEPT) for ranking in of]
            found["faithfulness"][name] = [heads.faithfulness(ranking, KEPT) for ranking in of]
            found["jaccard"][name] = [[float((a & b).sum() / (a | b).sum()) for b in kept] for a in kept]
    found["gain over"] = {
        other: {
            measure: difference(np.array(found[measure]["pk × |EAP-IG|"]) - np.array(found[measure][other]))
            for measure in ("faithfulness", "jaccard")
        }
        for other in ("EAP-IG", "placebo × |EAP-IG|")
    }
    return {"few": found}


def difference(values: np.ndarray) -> dict[str, float]:
    """Mean over draws (or pairs of different draws), with a 95 % jackknife interval over draws."""

    def mean(kept: np.ndarray) -> float:
        chosen = values[np.ix_(*[kept] * values.ndim)]
        return float(chosen.mean() if values.ndim == 1 else chosen[np.triu_indices(len(kept), 1)].mean())

    n = len(values)
    without = np.array([mean(np.delete(np.arange(n), i)) for i in range(n)])
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    centre, reach = mean(np.arange(n)), float(error * t.ppf(0.975, n - 1))
    return {"mean": centre, "low": centre - reach, "high": centre + reach}


def on_heads(model: str, task: str, count: int) -> dict[str, Any]:
    """Overlap of the verified edges, and detection of the heads of the best edges by all similarities."""
    scores = hs.score(model, "all", "all")
    with running(model, logits=True) as ready:
        edges = min(CIRCUIT, int(GraphModel(ready).table.mask.sum()) // 10)
        found = hs.task(ready, task, scores=scores, circuit=edges, prompts=count, k=60)
    table = hs.evaluate(scores, found.labels(), bootstrap=200)
    circuit = {"edges": edges, "faithfulness": found.faithfulness, "labels": found.labels()}
    return {"overlap": found.overlap(), "circuit": circuit, "detection": table.to_dict(), "best": found.rows()[:20]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--parts", default="curves,few,heads")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = {
        "curves": lambda: curves(given.model, given.task, given.prompts),
        "few": lambda: few(given.model, given.task, given.prompts, given.draws),
        "heads": lambda: on_heads(given.model, given.task, given.prompts),
    }
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for part in given.parts.split(","):
        found |= parts[part]()
        given.out.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
