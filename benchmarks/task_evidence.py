"""Do weights help to find a task's circuit? Rankings of edges compared by the circuits that they give.

    python benchmarks/task_evidence.py MODEL TASK OUT.json [--prompts 16] [--draws 4]

For one model and task, on held-out prompts:

- all edges: CPR and CMD of circuits by EAP, EAP-IG and at random;
- edges between heads (all others kept): the same by PK, CS, influence on generic text, EAP, EAP-IG, PK × |EAP|, and a
  placebo, PK permuted inside layer pairs × |EAP|;
- five prompts only: the circuits of several draws of five prompts, with PK, the placebo or neither as a prior: their
  faithfulness, and the Jaccard index of pairs of draws;
- overlap against task: how many of the edges with the largest exact values are in the top 1 % of each similarity;
- detection areas of all similarities on the heads of the smallest faithful circuit.
"""

from __future__ import annotations

import argparse
import json
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

import headspan as hs
from headspan.results.tasks.task_result import SHARES, on_edges
from headspan.running.opening import running
from headspan.running.tasks.graph_model import GraphModel
from headspan.running.tasks.measuring import Faithfulness, Measuring
from headspan.running.tasks.prompts import task_prompts
from headspan.vocabulary.heads import layers_of

GOAL = "logit-difference"
FEW = 5
SIZES = (0.005, 0.02, 0.1)  # shares of the edges between heads that circuits of few prompts keep


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


def run(model: str, task: str, count: int, draws: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        given = task_prompts(ready, task, count=count, seed=0)
        found: dict[str, Any] = {"model": model, "task": task, "prompts": len(given.prompts)}
        each = {}
        for method in ("eap", "ig"):
            measuring = Measuring(graph, GOAL, method, 2**31, lambda: None)
            each[method], clean, _ = measuring.attributions(given.prompts)
        held = Faithfulness(measuring, given.held_out)
        found["values"], found["solved"] = held.values, float((clean > 0).mean())
        print(json.dumps(found["values"]), flush=True)
        mean = {method: values.mean(0) for method, values in each.items()}
        random = rng.random(graph.table.mask.shape)
        found["all edges"] = {
            n: whole(held, r) for n, r in {"EAP": mean["eap"], "EAP-IG": mean["ig"], "random": random}.items()
        }
        print(json.dumps(found["all edges"]), flush=True)
        stats = hs.observe(ready)
        scores = hs.score(model, ["pk", "cs"], "flow")
        of = {name: on_edges(scores, name, graph.table)[name] for name in ("pk", "cs")}
        influence = hs.score(model, "influence", "flow", stats=stats)
        of["influence"] = on_edges(influence, "influence", graph.table)["influence"]
        of = {name: np.nan_to_num(values) for name, values in of.items()}
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
        print(json.dumps(found["edges between heads"]), flush=True)
        found["few"] = few(heads, each["ig"], of["pk"], graph, draws, rng)
    return found


def few(heads: Heads, values: np.ndarray, pk: np.ndarray, graph: GraphModel, draws: int, rng: Any) -> dict[str, Any]:
    """Circuits of five prompts: with a prior, with a placebo, and without."""
    chosen = [rng.choice(len(values), FEW, replace=False) for _ in range(draws)]
    rankings: dict[str, list[np.ndarray]] = {"EAP-IG": [], "pk × |EAP-IG|": [], "placebo × |EAP-IG|": []}
    placebo = permuted(pk, graph, rng)
    for places in chosen:
        size = np.abs(values[places].mean(0))
        for name, prior in zip(rankings, (1.0, pk, placebo), strict=True):
            rankings[name].append(size * prior)
    found: dict[str, Any] = {}
    for name, each in rankings.items():
        found[name] = {"faithfulness": {}, "jaccard": {}}
        for share in SIZES:
            kept = [heads.kept(ranking, share) for ranking in each]
            found[name]["jaccard"][str(share)] = [
                float((a & b).sum() / (a | b).sum()) for a, b in combinations(kept, 2)
            ]
            found[name]["faithfulness"][str(share)] = [heads.faithfulness(ranking, share) for ranking in each]
    return found


def overlap_and_detection(model: str, task: str, count: int) -> dict[str, Any]:
    """Overlap of the verified edges, and detection of the heads of the circuit by all similarities."""
    scores = hs.score(model, "all", "all")
    found = hs.task(model, task, scores=scores, circuit="auto", prompts=count, k=60)
    try:
        detection = hs.evaluate(scores, found.labels()).rows()
    except hs.HeadspanError as error:  # a circuit of all heads has nothing to detect
        detection = [{"error": str(error)}]
    circuit = {"edges": int(found.edges_kept.sum()), "faithfulness": found.faithfulness, "heads": len(found.labels())}
    return {"overlap": found.overlap(), "circuit": circuit, "detection": detection, "best": found.rows()[:20]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draws", type=int, default=4)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = run(given.model, given.task, given.prompts, given.draws)
    given.out.write_text(json.dumps(found))
    found |= overlap_and_detection(given.model, given.task, given.prompts)
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
