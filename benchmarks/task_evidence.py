"""Do weights help to find a task's circuit? Rankings of edges compared by the circuits that they give.

    python benchmarks/task_evidence.py MODEL TASK OUT.json [--prompts 16] [--draws 12] [--parts curves,few …]

For one model and task, on held-out prompts:

- all edges (part `all`, and in `curves`): CPR and CMD of circuits by EAP, EAP-IG and at random;
- edges between heads (all others kept): the same by PK, CS, influence on generic text, EAP, EAP-IG, PK × |EAP|, and a
  placebo, PK permuted inside layer pairs × |EAP|;
- five prompts only (part `few`): circuits from disjoint draws of five prompts, with PK, the placebo or neither as a
  prior: their faithfulness, the Jaccard index of pairs of draws, and what PK adds with a 95 % jackknife interval;
- overlap against task (part `edges`): how many of the edges with the largest exact values are in the top 1 % of each
  similarity;
- detection (part `classes`): areas of all similarities on the heads of the 100, 200 and 400 best edges (at most a tenth
  of all), and on those of the smallest circuit with a faithfulness of 0.8. The part `labels` does it for published
  classes of heads: TASK is gpt2-ioi then.

OUT.json is updated part by part, so a later run can add the others.
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
from headspan.paper.evaluation import _detection_areas, _detection_curve, detection
from headspan.results.tasks.edge_table import EdgeTable
from headspan.results.tasks.task_result import SHARES, on_edges
from headspan.running.opening import running
from headspan.running.tasks.graph_model import GraphModel
from headspan.running.tasks.measuring import Faithfulness, Measuring
from headspan.running.tasks.prompts import task_prompts
from headspan.vocabulary.heads import FLOW_PAIRINGS, Role, layers_of
from headspan.vocabulary.ports import PortTable

GOAL = "logit-difference"
FEW = 5
KEPT = 0.02  # share of the edges between heads that circuits of few prompts keep
CLASSES = (100, 200, 400)  # edges whose heads are a class to detect, at most a tenth of all
PLACEBOS = 4
RESAMPLES = 500


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

    def of_edges(self, kept: np.ndarray) -> float:
        """Faithfulness: 1 with all edges between heads, 0 with none of them."""
        return (self.of(self.others | kept) - self.nothing) / (1 - self.nothing)

    def areas(self, ranking: np.ndarray) -> dict[str, float]:
        curve = [1.0 if share == 1 else self.of_edges(self.kept(ranking, share)) for share in SHARES]
        return {**areas(curve), "curve": curve}  # type: ignore[dict-item]


def areas(curve: list[float]) -> dict[str, float]:
    values = np.array(curve)
    return {"cpr": float(np.trapezoid(values, SHARES)), "cmd": float(np.trapezoid(np.abs(1 - values), SHARES))}


def whole(faithfulness: Faithfulness, ranking: np.ndarray) -> dict[str, Any]:
    curve = [point["faithfulness"] for point in faithfulness.curve(ranking)]
    return {**areas(curve), "curve": curve}


def curves(model: str, task: str, count: int, observed: Path | None) -> dict[str, Any]:
    """Curves of circuits of all edges, and, with statistics, of edges between heads."""
    rng = np.random.default_rng(0)
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        given = task_prompts(ready, task, count=count, seed=0)
        found: dict[str, Any] = {"model": model, "task": task, "prompts": len(given.prompts)}
        mean = {}
        for method in ("eap", "ig"):
            measuring = Measuring(graph, GOAL, method, 2**31, lambda: None)
            each = list[np.ndarray]()
            clean, _ = measuring.attributions(given.prompts, each.append)
            mean[method] = np.concatenate(each).mean(0)
        held = Faithfulness(measuring, given.held_out)
        found["values"], found["solved"] = held.values, float((clean > 0).mean())
        random = rng.random(graph.table.mask.shape)
        found["all edges"] = {
            n: whole(held, r) for n, r in {"EAP": mean["eap"], "EAP-IG": mean["ig"], "random": random}.items()
        }
        if observed is None:
            return found
        of = similarities(model, ready, graph, observed)
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


def similarities(model: str, ready: Any, graph: GraphModel, observed: Path) -> dict[str, np.ndarray]:
    scores = hs.score(model, ["pk", "cs"], "flow")
    influence = hs.score(model, "influence", "flow", stats=statistics(ready, observed))
    of = {name: on_edges(scores, name, graph.table)[name] for name in ("pk", "cs")}
    of["influence"] = on_edges(influence, "influence", graph.table)["influence"]
    return {name: np.nan_to_num(values) for name, values in of.items()}


def statistics(ready: Any, observed: Path) -> hs.Statistics:
    """Statistics of the built-in text, observed once for all tasks."""
    return hs.Statistics.load(observed) if observed.exists() else hs.observe(ready, out=observed)


def few(model: str, task: str, count: int, draws: int) -> dict[str, Any]:
    """Circuits of five prompts: with a prior, with placebos, and without. No prompt is in two draws.

    A prior is the same for all draws, which alone makes their circuits more alike, and so is each placebo.
    """
    rng = np.random.default_rng(0)
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        given = task_prompts(ready, task, count=draws * FEW, seed=0)
        measuring = Measuring(graph, GOAL, "ig", 2**31, lambda: None)
        parts = list[np.ndarray]()
        measuring.attributions(given.prompts, parts.append)
        each = rng.permutation(np.concatenate(parts))  # they come by length
        heads = Heads(Faithfulness(measuring, given.held_out[:count]), graph)
        scores = hs.score(model, "pk", "flow")
        pk = np.nan_to_num(on_edges(scores, "pk", graph.table)["pk"])
        sizes = [np.abs(each[i * FEW : (i + 1) * FEW].mean(0)) for i in range(draws)]

        def circuits(prior: np.ndarray | float) -> list[np.ndarray]:
            return [heads.kept(prior * size, KEPT) for size in sizes]

        placebos = [circuits(permuted(pk, graph, rng)) for _ in range(PLACEBOS)]
        of = {"EAP-IG": [circuits(1.0)], "pk × |EAP-IG|": [circuits(pk)], "placebo × |EAP-IG|": placebos}
        found: dict[str, Any] = {"draws": draws, "edges": int(of["EAP-IG"][0][0].sum())}
        found["faithfulness"] = {
            name: [heads.of_edges(several[i % len(several)][i]) for i in range(draws)] for name, several in of.items()
        }
        found["jaccard"] = {
            name: np.mean([[[jaccard(a, b) for b in kept] for a in kept] for kept in several], 0).tolist()
            for name, several in of.items()
        }
    found["mean"] = {
        measure: {name: difference(np.array(values)) for name, values in found[measure].items()}
        for measure in ("faithfulness", "jaccard")
    }
    found["gain over"] = {
        other: {
            measure: difference(np.array(found[measure]["pk × |EAP-IG|"]) - np.array(found[measure][other]))
            for measure in ("faithfulness", "jaccard")
        }
        for other in ("EAP-IG", "placebo × |EAP-IG|")
    }
    return {"few": found}


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


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


def edges(model: str, task: str, count: int) -> dict[str, Any]:
    """Overlap of the verified edges."""
    scores = hs.score(model, "all", "flow")
    found = hs.task(model, task, scores=scores, prompts=count, k=60)
    return {"overlap": found.overlap(), "best": found.rows()[:20]}


def classes(model: str, task: str, count: int, observed: Path) -> dict[str, Any]:
    """Detection of the heads of circuits by all similarities; circuits of three times as many prompts."""
    with running(model, logits=True) as ready:
        graph = GraphModel(ready)
        stats = statistics(ready, observed)
        given = task_prompts(ready, task, count=3 * count)
        measuring = Measuring(graph, GOAL, "ig", 2**31, lambda: None)
        each = list[np.ndarray]()
        measuring.attributions(given.prompts, each.append)
        mean = np.concatenate(each).mean(0)
        held = Faithfulness(measuring, given.held_out[:count])
        ports, table = graph.weights.ports, graph.table
        smallest = held.smallest(mean, held.curve(mean))["edges"]
        sizes = sorted({min(size, table.n_edges // 10) for size in CLASSES})
        circuits = {size: table.circuit(mean, size) for size in (*sizes, smallest)}
        faithful = {size: held.of(kept) for size, kept in circuits.items()}
    scores = hs.score(model, "all", "flow")
    influence = hs.score(model, "influence", "flow", stats=stats)
    found = []
    for size, kept in circuits.items():
        row = {"edges": size, "faithfulness": faithful[size], "rule": size == smallest}
        found.append(row | detected([scores, influence], heads_of(task, ports, table, kept)))
    return {"classes": found}


def labelled(model: str, labels: str) -> dict[str, Any]:
    """The same for classes that others found, such as gpt2-ioi."""
    return {"model": model, "task": labels, "classes": [detected([hs.score(model, "all", "flow")], labels)]}


def detected(results: list[hs.Scores], labels: hs.Labels | str) -> dict[str, Any]:
    """Areas of all similarities of these results for one class of heads."""
    labels = hs.Labels.load(labels) if isinstance(labels, str) else labels
    areas = {
        metric: {
            measure: {
                pairing: estimate._asdict()
                for pairing, estimate in detection(result, labels, metric, measure=measure, bootstrap=RESAMPLES).items()
            }
            for measure in ("pr_auc", "average_precision")
        }
        for result in results
        for metric in result.metrics
    }
    of = {"heads": len(labels), "of": len(results[0].ports.of(Role.O))}
    return {**of, "areas": areas, "pk - cs": lead(results[0], labels)}


def heads_of(task: str, ports: PortTable, table: EdgeTable, kept: np.ndarray) -> hs.Labels:
    """The heads of a circuit; of a shared key or value all heads that use it."""
    ends = [table.writers[i].head for i in np.flatnonzero(kept.any(1))]
    ends += [table.readers[i].head for i in np.flatnonzero(kept.any(0))]
    used = {one for end in ends if isinstance(end, hs.Head) for one in (ports.group_of(end) if end.kv else (end,))}
    return hs.Labels.from_pairs([(head, task) for head in sorted(used)], task)


def lead(scores: hs.Scores, labels: hs.Labels) -> dict[str, dict[str, float]]:
    """Area of PK less that of CS, with 95 % intervals over the same resampled heads."""
    areas = {
        metric: np.array(
            [_detection_areas(*_detection_curve(scores, labels, metric, p), "pr", RESAMPLES, 0) for p in FLOW_PAIRINGS]
        )
        for metric in ("pk", "cs")
    }
    apart = (areas["pk"] - areas["cs"])[:, 1:]
    rows = {**{str(p): row for p, row in zip(FLOW_PAIRINGS, apart, strict=True)}, "average": apart.mean(0)}
    return {
        name: {
            "value": float(row[0]),
            "low": float(np.quantile(row[1:], 0.025)),
            "high": float(np.quantile(row[1:], 0.975)),
        }
        for name, row in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--parts", default="curves,few,edges,classes")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    observed = given.out.parent / f"{Path(given.model).stem}-statistics.safetensors"
    parts = {
        "all": lambda: curves(given.model, given.task, given.prompts, None),
        "curves": lambda: curves(given.model, given.task, given.prompts, observed),
        "few": lambda: few(given.model, given.task, given.prompts, given.draws),
        "labels": lambda: labelled(given.model, given.task),
        "edges": lambda: edges(given.model, given.task, given.prompts),
        "classes": lambda: classes(given.model, given.task, given.prompts, observed),
    }
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for part in given.parts.split(","):
        found |= parts[part]()
        given.out.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
