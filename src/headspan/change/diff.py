"""What changed between two models of the same shape: the drift of every head, its strongest edges, and hubs.

>>> import headspan as hs
>>> change = hs.diff("demo", "demo")
>>> repr(change).splitlines()[0]
'Diff of demo and demo: 64 weights, none moved; edges: 0 entered and 0 left the top 20'
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from headspan.change.edge_changes import EdgeChange, HubChange, edge_changes, hub_changes
from headspan.change.rounding import StoredPort, rounding_floor
from headspan.models.adapters import AdaptedWeights, adapt, is_adapter
from headspan.models.folding import FoldedWeights, unfolded
from headspan.models.folding import fold as folded
from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.results.identity import short_name
from headspan.results.scores import Scores, is_result
from headspan.results.tabular import Tabular, data_frame, same_content
from headspan.subspaces.bases import span_drift
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed, warn_renamed
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Head, Role

if TYPE_CHECKING:
    import pandas

TABLES = ("drift", "edge", "hub")


class PortDrift(NamedTuple):
    """How far one weight of one head moved.

    drift: 1 − PK/rank of the two subspaces (the larger rank where they differ), 0 for none, 1 for orthogonal ones.
    floor: the drift that rounding alone could cause (NaN if a storage format is unknown).
    angle: the largest principal angle, in degrees.
    """

    head: Head
    role: Role
    drift: float
    floor: float
    angle: float
    rank_before: int
    rank_after: int

    @property
    def moved(self) -> bool:
        """Whether the drift is more than rounding (or, with an unknown floor, more than nothing)."""
        return self.drift > (1e-12 if math.isnan(self.floor) else self.floor)


@dataclass(frozen=True, repr=False, eq=False)
class Diff(Tabular):
    """Two models compared; a notebook shows it, ``save`` writes it, ``rows`` and ``to_pandas`` list it."""

    base: str
    other: str
    folding: str
    k: int
    drift: list[PortDrift]
    edges: list[EdgeChange]
    hubs: list[HubChange]
    before: Scores = field(repr=False)
    after: Scores = field(repr=False)
    notes: list[str] = field(default_factory=list[str])

    def top(self, k: int | None = None) -> list[PortDrift]:
        """The weights that moved farthest."""
        return sorted(self.drift, key=lambda port: -port.drift)[: self.k if k is None else k]

    def of(self, port: str) -> PortDrift:
        """The drift of one weight, like ``"L4H7.O"``."""
        for line in self.drift:
            if f"{line.head}.{line.role}" == port:
                return line
        raise HeadspanError(f"there is no weight {port!r} in this comparison. Write for example {self._example()}")

    def _example(self) -> str:
        return f"{self.drift[0].head}.{self.drift[0].role}"

    def __eq__(self, other: object) -> bool:
        return same_content(self.rows("all"), other.rows("all")) if isinstance(other, Diff) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def rows(self, table: str = "drift") -> list[dict[str, Any]]:
        """Flat records with the same columns for all three tables: drift, edge and hub."""
        if table != "all" and table not in TABLES:
            raise HeadspanError(f"unknown table {table!r}. Choose {', '.join(TABLES)} or all")
        rows = [*map(_drift_row, self.top(len(self.drift))), *map(_edge_row, self.edges), *map(_hub_row, self.hubs)]
        if table == "all":
            columns = dict.fromkeys(key for row in rows for key in row)
            return [{key: row.get(key) for key in columns} for row in rows]
        return [row for row in rows if row["table"] == table]

    def records(self, table: str = "all") -> list[dict[str, Any]]:
        """The old name of :meth:`rows`."""
        warn_renamed("Diff.records", "Diff.rows")
        return self.rows(table)

    def to_pandas(self, table: str = "drift") -> pandas.DataFrame:
        """One of the tables (drift, edge, hub or all) as a data frame."""
        return data_frame(self.rows(table))

    def _inputs(self) -> list[str]:
        return [self.base, self.other]

    def _headline(self) -> str:
        moved = sum(line.moved for line in self.drift)
        kinds = [edge.kind for edge in self.edges]
        models = f"{short_name(self.base)} and {short_name(self.other)}"
        return (
            f"Diff of {models}: {len(self.drift)} weights, {moved or 'none'} moved; "
            f"edges: {kinds.count('entered')} entered and {kinds.count('left')} left the top {self.k}"
        )


@renamed(base="model")
@checked
def diff(
    model: ModelLike,
    other: ModelLike,
    *,
    fold: bool = False,
    k: int = 20,
    effects: bool = False,
    memory: str | int | None = None,
    progress: Update | None = None,
) -> Diff:
    """Compare two models of one shape: the drift of every head, edges and hubs before and after.

    model: the base (reference, live model, opened weights).
    other: the same model tuned or quantised, or the directory of a LoRA adapter of the base.
    fold: fold the norms of both into the weights first.
    k: how many edges of each pairing and kind to list.
    effects: also run both models and measure the effect of each listed edge in both (:func:`headspan.effects`).
    """
    if k < 1:
        raise HeadspanError(f"k is {k}. Give 1 or more")
    if effects and is_adapter(other):
        raise HeadspanError(f"{other} is an adapter, which cannot run by itself. Merge it and give the merged model")
    with ExitStack() as stack:
        update = stack.enter_context(progress_bar("comparing", progress))
        first, second = open_two(model, other, stack)
        if fold:
            first, second = (w if isinstance(w, FoldedWeights) else folded(w) for w in (first, second))
        layers, notes = _common_layers(first, second)
        notes = [*dict.fromkeys([*first.notes, *second.notes]), *notes]
        steps = len(layers) * len(ROLES)
        drift: list[PortDrift] = []
        for done, lines in enumerate(_drifts(first, second, layers), start=1):
            drift += lines
            update(done, 3 * steps)
        before, after = (
            _scored(weights, layers, memory, lambda done, total, part=part: update(
                steps * part + steps * done // max(total, 1), 3 * steps))
            for part, weights in ((1, first), (2, second))
        )  # fmt: skip
        first.check_unchanged()
        second.check_unchanged()
        if any(math.isnan(line.floor) for line in drift):
            kinds = sorted({w.storage_dtype(role, layers[0]) for w in (first, second) for role in ROLES})
            notes.append(f"the rounding floor is unknown for some weights (stored as {', '.join(kinds)})")
        order = {head_role: place for place, head_role in enumerate((h, r) for r in ROLES for h in first.heads(r))}
        drift.sort(key=lambda line: order[line.head, line.role])
        moved = {(line.head, line.role) for line in drift if line.moved}
        edges = [change for pairing in FLOW_PAIRINGS for change in edge_changes(before, after, pairing, k, moved)]
        if effects:
            edges, measured = _with_effects(edges, model, other, memory)
            notes += measured
        changed_hubs = [change for pairing in FLOW_PAIRINGS for change in hub_changes(before, after, pairing, k)]
        return Diff(
            first.reference, second.reference, first.folding, k, drift, edges, changed_hubs, before, after, notes
        )  # fmt: skip


def open_two(base: ModelLike, other: ModelLike, stack: ExitStack) -> tuple[AttentionWeights, AttentionWeights]:
    """Both models opened (and closed by the stack if they were not open before), the second perhaps an adapter."""
    opened: list[AttentionWeights] = []
    for ref in (base, other):
        if is_result(ref):
            raise HeadspanError(
                f"{ref} is a result file, and drift needs weights. Give the models, or compare two results "
                "with `hs.compare(first, second)`"
            )
        if ref is base and is_adapter(ref):
            raise HeadspanError(f"{ref} is an adapter. Give its base model first, then the adapter")
        if ref is other and is_adapter(ref):
            opened.append(adapt(opened[0], cast("str | os.PathLike[str]", ref)))
        elif isinstance(ref, AttentionWeights):
            opened.append(ref)
        else:
            opened.append(stack.enter_context(open(ref)))
    return opened[0], opened[1]


def _common_layers(first: AttentionWeights, second: AttentionWeights) -> tuple[tuple[int, ...], list[str]]:
    """The layers that both models have, with notes on other differences; different sizes are an error."""
    if first.folding != second.folding:
        raise HeadspanError(f"{first.reference} and {second.reference} are not both folded. Fold both, or neither")
    for what in ("d_model", "n_heads", "n_kv_heads"):
        seen = getattr(first, what), getattr(second, what)
        if seen[0] != seen[1]:
            raise HeadspanError(_other_shape(first, second, what, *seen))
    for role in ROLES:
        if first.d_head(role) != second.d_head(role):
            raise HeadspanError(
                _other_shape(first, second, f"d_head of {role}", first.d_head(role), second.d_head(role))
            )
    layers = tuple(layer for layer in first.layers if layer in second.layers)
    if not layers:
        raise HeadspanError(f"{first.reference} and {second.reference} have no attention layer in common")
    for head in (head for layer in layers for head in first.heads_in(Role.O, layer)):
        if (one := first.ports.kv_of(head)) != (other := second.ports.kv_of(head)):
            raise HeadspanError(_other_shape(first, second, f"the keys and values of {head} in", one, other))
    notes: list[str] = []
    for weights in (first, second):
        extra = len(weights.layers) - len(layers)
        if extra:
            notes.append(
                f"{weights.reference} has {extra} more attention layers; the {len(layers)} layers that both have are "
                "compared, number by number"
            )
    if None not in (first.vocab_size, second.vocab_size) and first.vocab_size != second.vocab_size:
        notes.append(
            f"the vocabularies differ ({first.vocab_size:,} and {second.vocab_size:,} tokens); heads do not need them"
        )
    return layers, notes


def _other_shape(first: AttentionWeights, second: AttentionWeights, what: str, before: Any, after: Any) -> str:
    return (
        f"{first.reference} has {what} {before}, {second.reference} has {after}. Heads can only be compared "
        "between models of the same width and the same numbers of heads"
    )


# -- drift ---------------------------------------------------------------------------------------------------


def _drifts(first: AttentionWeights, second: AttentionWeights, layers: Sequence[int]) -> Iterator[list[PortDrift]]:
    """The drift of every head, one role of one layer at a time; each tensor is read once."""
    raw = unfolded(second)
    # An adapter is added to its base, so the two differ only by arithmetic rounding.
    adapted = isinstance(raw, AdaptedWeights) and raw.base is unfolded(first)
    for layer in layers:
        for role in (role for role in ROLES if first.heads_in(role, layer)):
            before, after = (StoredPort(weights, role, layer, adapted) for weights in (first, second))
            drift, angle = span_drift(before.bases, before.ranks, after.bases, after.ranks)
            floor = rounding_floor(before, after, drift)
            yield [
                PortDrift(head, role, float(drift[i]), float(floor[i]), float(np.degrees(angle[i])),
                          int(before.ranks[i]), int(after.ranks[i]))
                for i, head in enumerate(first.heads_in(role, layer))
            ]  # fmt: skip


# -- scores --------------------------------------------------------------------------------------------------


def _scored(weights: AttentionWeights, layers: Sequence[int], memory: str | int | None, progress: Update) -> Scores:
    """PK of the flow pairings; pairs with a layer that the other model lacks are left out."""
    from headspan.scoring.run import score  # a page of a result needs `Diff`, not the engine

    scores = score(weights, PK, "flow", memory=memory, progress=progress)
    if len(layers) == len(weights.layers):
        return scores
    arrays = {}
    for key in scores.arrays:
        matrix = scores[key]
        rows, columns = ([head.layer in layers for head in heads] for heads in (matrix.sources, matrix.targets))
        arrays[key] = np.where(np.outer(rows, columns), matrix.values, np.float32(np.nan))
    return dataclasses.replace(scores, arrays=arrays)


def _with_effects(
    edges: list[EdgeChange], base: ModelLike, other: ModelLike, memory: str | int | None
) -> tuple[list[EdgeChange], list[str]]:
    """The edges with their effects in both models, measured in the same way, and notes about the measurement."""
    from headspan.running.effects import effects

    found = [effects(model, memory=memory, draws=0) for model in (base, other)]
    lists: list[list[float]] = []
    for measured in found:
        matrices = {pairing: measured.matrix(pairing) for pairing in FLOW_PAIRINGS}
        lists.append([matrices[edge.pairing].at(edge.source, edge.target) for edge in edges])
    told = list(dict.fromkeys(note for measured in found for note in measured.notes))
    values = zip(edges, *lists, strict=True)
    units = {pairing: found[0].unit(pairing) for pairing in FLOW_PAIRINGS}
    return [
        edge._replace(effect_before=a, effect_after=b, effect_unit=units[edge.pairing]) for edge, a, b in values
    ], told


# -- records -------------------------------------------------------------------------------------------------


def _drift_row(line: PortDrift) -> dict[str, Any]:
    row = {"table": "drift", "head": str(line.head), "role": str(line.role), "drift": line.drift}
    return row | {
        "floor": line.floor, "angle": line.angle, "moved": line.moved, "rank_before": line.rank_before,
        "rank_after": line.rank_after,
    }  # fmt: skip


def _edge_row(edge: EdgeChange) -> dict[str, Any]:
    row = edge._asdict() | {"pairing": str(edge.pairing), "source": str(edge.source), "target": str(edge.target)}
    return {"table": "edge"} | row


def _hub_row(hub: HubChange) -> dict[str, Any]:
    return {"table": "hub"} | hub._asdict() | {"pairing": str(hub.pairing), "head": str(hub.head)}
