"""Which edges of a model carry a task (the command ``headspan task``).

Attributions of all edges on some prompts (:mod:`headspan.running.tasks.attribution`), exact values of the best, overlap
and influence of the same edges, and a circuit with its faithfulness on other prompts
(:mod:`headspan.running.tasks.patching`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headspan.models.opening import ModelLike, open
from headspan.results.choices import labels_for
from headspan.results.effects import check_same_heads
from headspan.results.identity import identity, same_model
from headspan.results.labels import LabelsLike, classes_by_name
from headspan.results.observations import Statistics, given_statistics
from headspan.results.scores import Scores
from headspan.results.tasks.circuit import Circuit
from headspan.results.tasks.edge_table import EdgeTable
from headspan.results.tasks.examples import Examples
from headspan.results.tasks.graph_files import given_edges
from headspan.results.tasks.task_result import FAITHFUL, CurvePoint, Task, Values, on_edges
from headspan.running.examples import examples_of_task
from headspan.running.opening import RunningModel, running
from headspan.running.tasks.attribution import METHODS, shares_of
from headspan.running.tasks.graph_model import GraphModel
from headspan.running.tasks.measuring import Faithfulness, Measuring, summary
from headspan.running.tasks.objectives import check_objective
from headspan.running.tasks.prompts import TaskPrompts, check_task, task_prompts
from headspan.running.tasks.resamples import Resamples
from headspan.scoring.run import score
from headspan.subspaces.metrics import OBSERVED_METRICS
from headspan.system.arguments import checked
from headspan.system.inputs import mode_of
from headspan.system.memory import default_memory, parse_memory
from headspan.system.outputs import check_output
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.ends import EndsLike, given_ends
from headspan.vocabulary.errors import HeadspanError, warn

K = 40
AUTO = "auto"


@checked
def task(
    model: ModelLike,
    task: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    *,
    method: str = "ig",
    k: int = K,
    verify: bool = True,
    circuit: int | str | os.PathLike[str] | Circuit | None = None,
    from_: EndsLike | None = None,
    to: EndsLike | None = None,
    labels: LabelsLike | None = None,
    scores: Scores | str | os.PathLike[str] | None = None,
    stats: Statistics | str | os.PathLike[str] | None = None,
    prompts: int | None = None,
    objective: str = "logit-difference",
    seed: int = 0,
    bos: str = "auto",
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    memory: str | int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Update | None = None,
) -> Task:
    """Which edges carry a task: estimates for all edges, exact values for the best, and a circuit.

    Parameters
    ----------
    model : a model reference, a live transformers, PEFT or TransformerLens model, or a `RunningModel` with logits.
    task : a built-in task (``"ioi"``, ``"induction"``, ``"greater-than"``, ``"successor"``, ``"gendered-pronoun"``), a
        JSONL, JSON or CSV file with the columns clean, corrupted, answer and wrong, or such rows as a list.
    method : ``"ig"``, gradients averaged between corrupted and clean embeddings (better circuits), or ``"eap"``, the
        gradient of the clean run (better single edges, five times faster).
    k : edges to list. verify : measure these exactly, one pass each.
    circuit : a number of edges, ``"auto"`` for the smallest circuit with a faithfulness of at least 0.8 on held-out
        prompts, or a circuit to evaluate: a `Circuit`, its file, or a graph of EAP-IG or MIB (.json, .pt).
    from_, to : list only edges that start or end here: a head (``"L5H1"``), a port (``"L5H1.K"``), a layer (``"L5"``),
        a class of ``labels``, ``"embedding"``, ``"logits"``, an MLP (``"L5MLP"``), or a list of them. A circuit is of
        all edges. labels : head classes, or the name or CSV file of some; they become columns of the rows.
    scores : a result of this model; the overlap of every edge between heads is listed with its rank.
    stats : statistics of this model (`headspan.observe`); influence is listed likewise.
    prompts : how many for attribution, and again as many held-out ones. Default: 48 of a built-in task; half of a file.
    objective : what the task measures at the last token: ``"logit-difference"``, ``"log-probability"`` or ``"kl"``.
    memory : memory limit in addition to the model: ``"2GB"`` … With little of it batches are smaller, and there are
        fewer than 200 resamples for ``frequency``.
    progress : called with (steps done, all steps); by default a bar in a terminal or notebook.
    """
    _check(method, k, objective, circuit, prompts)
    check_task(task)
    if out is not None:
        inputs: list[Any] = [model, scores, stats, circuit, task]
        check_output(out, "task", inputs=inputs, force=force, ending=".safetensors")
    budget = default_memory() if memory is None else parse_memory(memory)
    scores = Scores.load(scores) if isinstance(scores, (str, os.PathLike)) else scores
    stats = None if stats is None else given_statistics(stats)
    if isinstance(model, (str, os.PathLike)):  # report a model or result that cannot be used before loading it
        with open(model) as weights:
            check_same_heads(weights.ports, scores, str(model))
    with (
        progress_bar("tracing edges", progress) as update,
        running(model, device=device, dtype=dtype, logits=True) as ready,
    ):
        graph = GraphModel(ready)
        check_same_heads(graph.weights.ports, scores, ready.reference)
        wanted = _wanted(circuit, graph.table)
        classes = labels_for(labels, graph.weights.ports, {"reference": ready.reference, **ready.identity}, scores)
        ends = given_ends(from_, to, graph.table.ports, classes)
        asked = graph.table.between(ends)
        if not asked.any():
            raise HeadspanError(f"no edge goes {ends}: edges go from a writer to a later reader. Choose other ends")
        given = task_prompts(ready, task, count=prompts, seed=seed, bos=bos)
        similarities = _similarities(graph, ready, scores, stats)
        found = _Run(ready, graph, given, (method, objective, k, seed), asked, budget, update)
        found.attribute()
        if verify:
            found.verify()
        if wanted is not None:
            found.find_circuit(wanted)
        found.watch()
        result = found.result(similarities, {"bos": ready.start_token(bos), "dtype": ready.dtype})
        result.asked, result.classes = asked if ends else None, classes_by_name(classes)
        if out is not None:
            result.save(out, force=force)
    for sentence in result.notes:
        warn(sentence)
    return result


class _Run:
    """The steps of one call; Ctrl-C ends a step, and those after it are left out."""

    def __init__(
        self, ready: RunningModel, graph: GraphModel, given: TaskPrompts, chosen: tuple[str, str, int, int],
        asked: np.ndarray, memory: int, update: Update,
    ) -> None:  # fmt: skip
        self.asked = asked
        self.ready, self.graph, self.given = ready, graph, given
        self.method, self.goal, self.k, self.seed = chosen
        self.notes = [*ready.notes, *given.notes]
        self.interrupted = False
        self._done, self._all, self._update = 0, 0, update
        self.resamples = Resamples(len(given.prompts), self.asked, self.seed, memory)
        room = max(1, memory - self.resamples.nbytes)
        self.measuring = Measuring(graph, self.goal, self.method, room, self._tick)
        shape = graph.table.mask.shape
        self.exact = np.full(shape, np.nan, dtype=np.float32)
        self.held_out: Values | None = None
        self.circuit: np.ndarray | None = None
        self.faithfulness: float | None = None
        self.curve: list[CurvePoint] = []
        self.examples: Examples | None = None
        first = self.measuring.batches(given.prompts)[0]
        graph.check(first.clean[:1], first.corrupted[:1])

    def _tick(self) -> None:
        self._done += 1
        self._update(self._done, max(self._all, self._done))

    def attribute(self) -> None:
        parts = len(self.measuring.batches(self.given.prompts))
        self._all = parts * (len(shares_of(self.method)) + self.k)
        clean, corrupted = self.measuring.attributions(self.given.prompts, self.resamples.add)
        self.values: Values = summary(clean, corrupted)
        self.attribution = self.resamples.mean()
        self.frequency = self.resamples.inclusion(self.k)
        if len(clean) < len(self.given.prompts):
            self._stopped(f"attributions are of {len(clean)} of {len(self.given.prompts)} prompts")
        if self.values["solved"] < FAITHFUL and self.goal == "logit-difference":
            self.notes.append(
                f"{self.ready.reference} solves only {self.values['solved']:.0%} of the prompts of {self.given.name} "
                f"(mean logit difference {self.values['clean']:.2f}), so there may be little to find"
            )

    def verify(self) -> None:
        """Measure the edges with the largest attributions exactly."""
        edges = self.graph.table.strongest(self.attribution, self.k, self.asked)
        if self.interrupted:
            return
        try:
            self.exact.ravel()[edges] = self.measuring.exact(self.given.prompts, edges)
        except KeyboardInterrupt:
            self._stopped("no edge was measured exactly")

    def find_circuit(self, wanted: int | str | np.ndarray) -> None:
        """A circuit of so many edges, the smallest faithful one, or a given one, on held-out prompts."""
        if self.interrupted:
            return
        try:
            faithfulness = Faithfulness(self.measuring, self.given.held_out)
            self.held_out = faithfulness.values
            if isinstance(wanted, np.ndarray):
                self.circuit, self.faithfulness = wanted, faithfulness.of(wanted)
                return
            self.curve = faithfulness.curve(self.attribution)
            if isinstance(wanted, int):
                best = faithfulness.point(self.attribution, wanted)
            else:
                best = faithfulness.smallest(self.attribution, self.curve)
            self.circuit = self.graph.table.circuit(self.attribution, best["edges"])
            self.faithfulness = best["faithfulness"]
        except KeyboardInterrupt:
            self._stopped("there is no circuit")

    def _stopped(self, what: str) -> None:
        self.interrupted = True
        self.notes.append(f"interrupted: {what}")

    def watch(self) -> None:
        """What the best edges between heads do on the first prompt."""
        if self.interrupted:
            return
        try:
            self.examples = examples_of_task(
                self.ready, self.graph.replayer, self.graph.table, self.attribution, self.given.prompts[0],
                self.given.name,
            )  # fmt: skip
        except KeyboardInterrupt:
            self._stopped("there are no examples")

    def result(self, similarities: dict[str, np.ndarray], how: dict[str, Any]) -> Task:
        table = self.graph.table
        return Task(
            self.given.name,
            self.graph.weights.ports,
            [str(port.head) for port in table.readers if port.head.kind in ("mlp", "block")],
            self.graph.parallel,
            self.attribution,
            self.exact,
            self.frequency,
            min(self.k, int(self.asked.sum())),
            self.values,
            self.held_out,
            self.circuit,
            self.faithfulness,
            self.curve,
            similarities,
            {**identity(self.ready.identity), "reference": self.ready.reference},
            {
                "task": self.given.source,
                "method": self.method,
                "objective": self.goal,
                "seed": self.seed,
                "resamples": self.resamples.count,
                "sha256": self.given.sha256,
                "d_model": self.graph.weights.d_model,
                **how,
            },
            self.interrupted,
            list(dict.fromkeys(self.notes)),
            self.examples,
        )


def _check(
    method: str, k: int, objective: str, circuit: int | str | os.PathLike[str] | Circuit | None, prompts: int | None
) -> None:
    """Refuse arguments that cannot be used, before the model is loaded."""
    if method not in METHODS:
        raise HeadspanError(f"unknown method {str(method)[:40]!r}. Choose {' or '.join(METHODS)}")
    check_objective(objective, method)
    if k < 1:
        raise HeadspanError(f"k is {k}. Give 1 or more")
    if prompts is not None and prompts < 1:
        raise HeadspanError(f"prompts is {prompts}. Give 1 or more")
    if isinstance(circuit, int) and circuit < 1:
        raise HeadspanError(f"a circuit of {circuit} edges cannot be made. Give 1 or more, or auto")
    if isinstance(circuit, (str, os.PathLike)) and circuit != AUTO and mode_of(Path(circuit)) is None:
        raise HeadspanError(f"there is no file {circuit}. Give a number of edges, auto, or the file of a circuit")


def _wanted(circuit: int | str | os.PathLike[str] | Circuit | None, table: EdgeTable) -> int | str | np.ndarray | None:
    """The size of a circuit to make, ``"auto"``, or the edges of a given one."""
    if circuit is None or isinstance(circuit, int) or circuit == AUTO:
        return circuit  # pyright: ignore[reportReturnType] (only "auto" is a text here)
    return given_edges(circuit, table)


def _similarities(
    graph: GraphModel, ready: RunningModel, scores: Scores | None, stats: Statistics | None
) -> dict[str, np.ndarray]:
    """Overlap and influence of the edges between heads, with their ranks."""
    found: list[Scores] = []
    if scores is not None:
        if doubt := same_model(ready.identity, scores.provenance, "the model", "the scores"):
            warn(doubt)
        found.append(scores)
    if stats is not None:
        if scores is not None and any(name in scores.metrics for name in OBSERVED_METRICS):
            raise HeadspanError("the scores have influence already. Leave out stats")
        found.append(score(graph.weights, list(OBSERVED_METRICS), "flow", stats=stats))
    values: dict[str, np.ndarray] = {}
    for result in found:
        for metric in result.metrics:
            values |= on_edges(result, metric, graph.table)
    return values
