"""Neurons of MLPs as nodes: ``L3:17``, ``L3:5-20``, ``L3:*``, ``L3E5:17`` of an expert, ``L3S:17`` of a shared MLP.

A neuron is one node. It reads its rows of gate and up (two directions, a basis of dimension 2, in a gated MLP; one
direction in a plain one) and writes its column of down. Its name is ``L3N17``, ``L3E5N17`` in an expert and
``L3SN17`` in a shared MLP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from headspan.models.mlp import Mlps, Part
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.node_sets import NodeSet, Place, centred_writers
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

_ITEM = re.compile(r"(?:L?(?P<layer>[0-9]{1,6}|\*)(?P<part>S|E(?P<expert>[0-9]{1,6}|\*))?:)?(?P<which>.*)", re.I)
_NAME = re.compile(r"L(?P<layer>[0-9]{1,6})(?P<part>S|E(?P<expert>[0-9]{1,6}))?N(?P<which>[0-9]{1,9})", re.I)
_RUN = re.compile(r"([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?")


def parse_indices(text: str, count: int, what: str) -> list[range]:
    """Ranges of whole numbers below ``count`` from ``0,5,10-20`` or ``*``.

    >>> parse_indices("0,5,10-12", 20, "features")
    [range(0, 1), range(5, 6), range(10, 13)]
    """
    found = []
    for item in text.split(","):
        if item.strip() == "*":
            found.append(range(count))
            continue
        match = _RUN.fullmatch(item.strip())
        if match is None:
            raise HeadspanError(f"{item[:40]!r} does not name {what}: write numbers like 0,5,10-20, or * for all")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise HeadspanError(f"{item.strip()[:40]} is not among the {what}, which go from 0 to {count - 1}")
        found.append(range(first, last + 1))
    return found


def joined(runs: Iterable[range]) -> np.ndarray | range:
    """The sorted distinct numbers of several ranges; a single range is returned unchanged."""
    runs = list(runs)
    if len(runs) == 1:
        return runs[0]
    return np.unique(np.concatenate([np.arange(run.start, run.stop) for run in runs]))


def neuron_sets(weights: AttentionWeights, text: str | Iterable[str]) -> list[NodeSet]:
    """The neurons named by a text, one set per dense MLP, group of experts or shared MLP."""
    mlps = Mlps(weights)
    items = [part for piece in ([text] if isinstance(text, str) else list(text)) for part in str(piece).split(",")]
    chosen: dict[tuple[int, int], list[range]] = {}
    last = ("", "", "")
    for item in items:
        match = _ITEM.fullmatch(item.strip())
        which = match["which"].strip() if match else ""
        if match is None or not which or (match["layer"] is None and not last[0] and which != "*"):
            raise HeadspanError(f"{item[:60]!r} names no neurons: write L3:17, L3:5-20, L3:* or L3E0:17 of an expert")
        if match["layer"] is not None:
            last = (match["layer"], (match["part"] or "").upper()[:1], match["expert"] or "")
        layer, part, expert = last if last[0] else ("*", "", "")
        _choose(mlps, layer, part, expert, which, chosen)
    sets: list[NodeSet] = [Neurons(mlps, layer, part, joined(runs)) for (layer, part), runs in sorted(chosen.items())]
    if not sets:
        raise HeadspanError(f"{weights.reference} has no MLP of a known kind, so it has no neurons to compare")
    return sets


def _choose(
    mlps: Mlps, layer: str, kind: str, expert: str, which: str, chosen: dict[tuple[int, int], list[range]]
) -> None:
    """Add the neurons named by one item."""
    layers = range(mlps.weights.n_layers) if layer == "*" else [int(layer)]
    for number in layers:
        parts = mlps.parts(number)
        if not parts and layer != "*":
            raise HeadspanError(f"layer {number} of {mlps.weights.reference} has no MLP of a known kind")
        routed = any(part.layout.experts for part in parts)
        fitting = [i for i, part in enumerate(parts) if _fits(part, kind, which)]
        if not fitting and layer != "*":
            ways = ["L{0}E0:17 for a neuron of an expert"] if routed else []
            ways += ["L{0}S:17 for one of the shared MLP"] if any(part.layout.shared for part in parts) else []
            ways = ways or ["L{0}:17"]
            raise HeadspanError(
                f"layer {number} of {mlps.weights.reference} has no such neurons: write "
                + " or ".join(way.format(number) for way in ways)
            )
        for i in fitting:
            part = parts[i]
            runs = parse_indices(which, part.neurons, f"neurons of layer {number}")
            if part.layout.experts and expert not in ("", "*"):
                if int(expert) >= part.experts:
                    raise HeadspanError(f"layer {number} has the experts 0 to {part.experts - 1}, not {expert}")
                experts: Iterable[int] = [int(expert)]
            else:
                experts = range(part.experts)
            if runs == [range(part.neurons)] and len(list(experts)) == part.experts:
                runs, experts = [range(part.neurons * part.experts)], [0]
            found = chosen.setdefault((number, i), [])
            found += [range(e * part.neurons + r.start, e * part.neurons + r.stop) for e in experts for r in runs]


def _fits(part: Part, kind: str, which: str) -> bool:
    """Whether an item (without an expert, with experts, or for the shared MLP) refers to this part of a layer."""
    if kind == "S":
        return part.layout.shared
    if kind == "E":
        return part.layout.experts
    return which == "*" or not (part.layout.experts or part.layout.shared)


class Neurons(NodeSet):
    """Neurons of one layer: of its dense MLP, its experts or its shared MLP."""

    def __init__(self, mlps: Mlps, layer: int, part: int, ids: np.ndarray | range) -> None:
        self._mlps, self._layer, self._part = mlps, layer, mlps.parts(layer)[part]
        layout = self._part.layout
        self.kind = "expert neuron" if layout.experts else "neuron"
        which = "experts" if layout.experts else "shared MLP" if layout.shared else "MLP"
        self.label = f"the {which} of layer {layer} of {mlps.weights.reference}"
        self.notes, self.d_model = [], mlps.weights.d_model
        if layout.gate is not None:
            self.notes.append("each neuron of a gated MLP reads two directions, its rows of gate and of up: r = 2")
        written = mlps.written_in(layer, self._part)
        self.places = {
            Role.R: Place(mlps.position(layer), layer),
            Role.W: Place(mlps.position(written), written),
        }
        self.ids, self.population = ids, self._part.experts * self._part.neurons
        norm = mlps.norm(layer) if mlps.folded else None
        reads = {Role.R} if norm is not None and norm.kind == "layer" else set()
        self.centred_roles = centred_writers(mlps.weights) | reads

    @property
    def stem(self) -> str:
        layout = self._part.layout
        return f"L{self._layer}{'E' if layout.experts else 'SN' if layout.shared else 'N'}"

    def name(self, number: int) -> str:
        expert, neuron = divmod(number, self._part.neurons)
        return f"{self.stem}{expert}N{neuron}" if self._part.layout.experts else f"{self.stem}{neuron}"

    def find(self, name: str) -> int | None:
        match = _NAME.fullmatch(name.strip())
        if match is None:
            return None
        number = int(match["expert"] or 0) * self._part.neurons + int(match["which"])
        fits = number < self.population and self.name(number).upper() == name.strip().upper()
        return number if fits and number in self.ids else None

    def width(self, role: Role) -> int:
        return self._mlps.width(self._part, role)

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        found = np.empty((len(ids), self.d_model, self.width(role)), np.float32)
        experts = ids // self._part.neurons
        for expert in np.unique(experts):
            here = experts == expert
            found[here] = self._mlps.read(self._layer, self._part, role, int(expert))[ids[here] % self._part.neurons]
        return found
