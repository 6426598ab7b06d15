"""Measured effects of edges: inspecting them and storing them in a result.

:func:`headspan.running.effects.effects` measures them; nothing here runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headspan.results.checks import check_extra, damaged, effect_shape, is_effect
from headspan.results.head_scores import KINDS
from headspan.results.identity import identity, same_model
from headspan.results.labels import with_labels
from headspan.results.large_effects import FLOORS, LEAST_RATIO, UNITS
from headspan.results.matrix import ScoreMatrix
from headspan.results.metadata import is_list, is_object
from headspan.results.scores import Scores
from headspan.results.tabular import Tabular
from headspan.results.tasks.examples import PREFIX, Examples
from headspan.subspaces.metrics import PK
from headspan.system.deprecation import warn_renamed
from headspan.system.ordering import places
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Pairing, Role, layers_of
from headspan.vocabulary.ports import PortTable

NOT_COMPARED = (
    "These effects were measured without random writes, so headspan cannot say which are large. "
    "Measure them again: `hs.effects(model, into=scores)`"
)
EXAMPLES = "examples"  # key among the annotations of effects
HAS_HABIT, LOST_SHARE = 0.2, 0.1  # head score that counts as present, and the share of it whose loss counts


@dataclass(repr=False, eq=False)
class Effects(Tabular):
    """Measured edges: ``effects.of("OK")`` is (sources, targets), NaN where an edge was not measured.

    arrays: by (measure, pairing). Measures are the materials (``random``, ``text`` or ``tokens``), their largest value
    among the query heads of a shared key/value head (``random_largest`` …), what random writes do (``random_turned`` …,
    where an effect is at or above its floor), and the change of the head scores.
    clean: head scores of the clean run. write_norms: mean length of what each head writes.
    model: provenance of the weights that ran, where they are known. classes: of labelled heads, as columns of the rows.
    examples: what the best edges do on one short sequence; None in files of version 0.3.
    """

    ports: PortTable
    arrays: dict[tuple[str, Pairing], np.ndarray]
    clean: dict[str, np.ndarray]
    write_norms: np.ndarray
    protocol: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])
    interrupted: bool = False
    model: dict[str, Any] = field(default_factory=dict[str, Any])
    examples: Examples | None = None
    classes: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        return tuple(dict.fromkeys(pairing for _, pairing in self.arrays))

    @property
    def materials(self) -> tuple[str, ...]:
        """The materials that the model was run on."""
        return tuple(name for name in ("random", "text", "tokens") if any(name == key for key, _ in self.arrays))

    def of(self, pairing: Pairing | str, material: str | None = None) -> np.ndarray:
        """The effect of every edge of a pairing: on one material, or the largest of all."""
        pairing = Pairing.parse(pairing)
        names = self.materials if material is None else (material,)
        found = [self.arrays[name, pairing] for name in names if (name, pairing) in self.arrays]
        if not found:
            measured = ", ".join(f"{name} {p}" for name, p in self.arrays if name in self.materials)
            raise HeadspanError(f"no effects of {pairing} were measured on {material or 'anything'}: only {measured}")
        return found[0] if len(found) == 1 else np.fmax(*found)

    def matrix(self, pairing: Pairing | str, material: str | None = None) -> ScoreMatrix:
        """The same as a labelled matrix, with ``top``, ``at`` and ``rank_of``."""
        pairing = Pairing.parse(pairing)
        values = self.of(pairing, material)
        return ScoreMatrix(
            "effect", pairing, self.ports.of(pairing.source), self.ports.of(pairing.target), values, self.ports
        )

    def _check(self, path: Path) -> None:
        extra = _as_extra(self)
        check_extra(extra, self.ports, path)
        _check_protocol(self.protocol)
        if not self.materials:
            raise damaged(path, "it has no effects")
        if self.examples is not None:
            self.examples.check(self.ports, path)

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per edge that was asked for, the largest effect of each pairing first."""
        return self.records()

    def asked(self, pairing: Pairing | str) -> np.ndarray:
        """True for the edges with the ends ``from_`` and ``to``: more are measured, to compare each with its layers."""
        pairing = Pairing.parse(pairing)
        sides = [(role, self.protocol.get(name)) for name, role in zip(("from", "to"), pairing, strict=True)]
        rows, columns = (
            np.array([names is None or f"{port}.{role}" in names for port in self.ports.of(role)], dtype=bool)
            for role, names in sides
        )
        return rows[:, None] & columns[None, :]

    def _headline(self) -> str:
        counts = ", ".join(f"{int((~np.isnan(self.of(p))).sum()):,} {p}" for p in self.pairings)
        return f"effects of {counts} edges, measured on {self.measured_on}"

    # -- large effects (:mod:`headspan.results.large_effects`) ------------------------------------------------

    @property
    def compared(self) -> bool:
        """Whether effects were compared with random writes, so that they can be called large or small."""
        return "floors" in self.protocol

    def unit(self, pairing: Pairing | str) -> str:
        """The unit of an effect of this pairing."""
        return UNITS[Pairing.parse(pairing).target]

    def floor(self, pairing: Pairing | str) -> float:
        """The least effect that can be large, in the pairing's unit."""
        pairing = Pairing.parse(pairing)
        floors: dict[str, float] = self.protocol["floors"] if self.compared else {}
        return float(floors.get(str(pairing), FLOORS[pairing.target]))

    def ratio(self, pairing: Pairing | str) -> np.ndarray:
        """The effect divided by that of a random write, where it is at or above its floor; else NaN.

        With several materials, the largest ratio.
        """
        pairing = Pairing.parse(pairing)
        found = np.full(self.of(pairing).shape, np.nan)
        for name in self.materials:
            if (f"{name}_turned", pairing) in self.arrays:
                turned = np.maximum(self.arrays[f"{name}_turned", pairing], np.finfo(np.float32).tiny)
                found = np.fmax(found, self.arrays[name, pairing] / turned)
        return found

    def large(self, pairing: Pairing | str) -> np.ndarray:
        """True for edges with a large effect: at or above the floor, and well above the effect of a random write."""
        least = float(self.protocol.get("least_ratio", LEAST_RATIO))
        with np.errstate(invalid="ignore"):
            return self.ratio(pairing) >= least

    def judged(self, pairing: Pairing | str) -> np.ndarray:
        """True where it is known whether the effect is large: it was measured, and compared unless below the floor."""
        pairing = Pairing.parse(pairing)
        known = np.zeros(self.of(pairing).shape, dtype=bool)
        if not self.compared:
            return known
        known |= ~np.isnan(self.of(pairing))
        for name in self.materials:
            if (name, pairing) in self.arrays:
                turned = self.arrays.get((f"{name}_turned", pairing), np.nan)
                with np.errstate(invalid="ignore"):
                    known &= ~((self.arrays[name, pairing] >= self.floor(pairing)) & np.isnan(turned))
        return known | self.large(pairing)

    def used(self, pairing: Pairing | str) -> np.ndarray:
        """The old name of :meth:`large`."""
        warn_renamed("Effects.used", "Effects.large")
        return self.large(pairing)

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens the model was run on, by material, where the result records it."""
        lengths = self.protocol.get("tokens", {})
        return {name: int(sum(lengths[name])) for name in self.materials if name in lengths}

    @property
    def measured_on(self) -> str:
        """``random (336 tokens) and text (528 tokens)``."""
        sizes = self.tokens
        return " and ".join(f"{m} ({sizes[m]:,} tokens)" if m in sizes else m for m in self.materials)

    def lost(self, pairing: Pairing | str) -> np.ndarray:
        """True where the target loses more than a tenth of a head score that it has; a KV head has its group's mean."""
        pairing = Pairing.parse(pairing)
        shape = self.of(pairing).shape
        lost = np.zeros(shape, dtype=bool)
        for kind in KINDS:
            if (kind, pairing) in self.arrays and kind in self.clean:
                groups = (self.ports.group_of(head) for head in self.ports.of(pairing.target))
                places = [[self.ports.find(head, Role.O) for head in group] for group in groups]
                clean = np.array([self.clean[kind][place].mean() for place in places])[None, :]
                with np.errstate(invalid="ignore"):
                    lost |= (clean >= HAS_HABIT) & (self.arrays[kind, pairing] < -LOST_SHARE * clean)
        return lost

    def at(self, pairing: Pairing | str, source: Any, target: Any) -> float | None:
        """The effect of one edge, or None where it was not measured."""
        if Pairing.parse(pairing) not in self.pairings:
            return None
        value = self.matrix(pairing).at(source, target)
        return None if np.isnan(value) else value

    def percentiles(self, pairing: Pairing | str) -> np.ndarray:
        """The percentage of edges between the same two layers that have a smaller effect (ties count half)."""
        matrix = self.matrix(pairing)
        out = np.full(matrix.values.shape, np.nan)
        for rows, columns in _layer_blocks(matrix):
            out[np.ix_(rows, columns)] = _percentile(matrix.values[np.ix_(rows, columns)])
        return out

    def records(
        self, scores: Scores | None = None, *, metric: str = PK, k: int | None = None, by: str = "effect"
    ) -> list[dict[str, Any]]:
        """Rows of a table: the ``k`` edges of each pairing with the largest ``"effect"`` or ``"score"``.

        Head scores are given as their change; negative if the target loses some of it without the edge.
        """
        rows: list[dict[str, Any]] = []
        for pairing in self.pairings:
            scored = scores[metric, pairing].forward() if scores is not None and (metric, pairing) in scores else None
            rows += _records(self, pairing, scored, k, by)
        return with_labels(rows, self.classes)


def _records(
    effects: Effects, pairing: Pairing, scored: ScoreMatrix | None, k: int | None, by: str
) -> list[dict[str, Any]]:
    matrix, percentiles = effects.matrix(pairing), effects.percentiles(pairing)
    large, judged, ratios = effects.large(pairing), effects.judged(pairing), effects.ratio(pairing)
    values = matrix.values
    ranks = None if scored is None else places(scored.values)
    order = values if by == "effect" or scored is None else np.where(np.isnan(values), np.nan, scored.values)
    rows, columns = np.nonzero(~np.isnan(values) & effects.asked(pairing))
    best = np.argsort(-order[rows, columns], kind="stable")[:k]
    extra = [n for n in _columns(effects) if (n, pairing) in effects.arrays]
    table: list[dict[str, Any]] = []
    for i, j in zip(rows[best], columns[best], strict=True):
        names = (str(pairing), str(matrix.sources[int(i)]), str(matrix.targets[int(j)]))
        row: dict[str, Any] = dict(zip(("pairing", "source", "target"), names, strict=True))
        row["score"] = None if scored is None else float(scored.values[i, j])
        row["rank"] = None if ranks is None else int(ranks[i, j]) or None
        row |= {"effect": float(values[i, j]), "effect_unit": effects.unit(pairing)}
        row["large_effect"] = bool(large[i, j]) if judged[i, j] else None
        row["random_write_ratio"] = None if np.isnan(ratios[i, j]) else float(ratios[i, j])
        row["percentile_in_layers"] = float(percentiles[i, j])
        row |= dict.fromkeys(_columns(effects))
        row |= {name: float(effects.arrays[name, pairing][i, j]) for name in extra}
        table.append({_TITLES.get(key, key): value for key, value in row.items()})
    return table


_TITLES = {"random": "effect_random", "text": "effect_text", "tokens": "effect_tokens"} | {
    kind: f"change_{kind}" for kind in KINDS
}


def _columns(effects: Effects) -> list[str]:
    """Further columns: the materials where there are several, the largest of a group, the head scores."""
    names = dict.fromkeys(name for name, _ in effects.arrays)
    named = [name for name in names if not name.endswith("_turned")]  # told as a ratio
    return [name for name in named if name not in effects.materials or len(effects.materials) > 1]


def _layer_blocks(matrix: ScoreMatrix) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns of the edges between each two layers."""
    source, target = layers_of(matrix.sources), layers_of(matrix.targets)
    return [
        (np.flatnonzero(source == a), np.flatnonzero(target == b))
        for a in np.unique(source) for b in np.unique(target) if a < b
    ]  # fmt: skip


def effects_of(scores: Scores) -> Effects:
    """The effects in a result; raises if it has none, with how to measure them."""
    found = effects_in(scores)
    if found is None:
        raise HeadspanError("this result has no effects: measure them with `hs.effects(model, into=scores)`")
    return found


def compared_effects(scores: Scores) -> Effects:
    """The effects in a result, refused where they were not compared with random writes."""
    found = effects_of(scores)
    if not found.compared:
        raise HeadspanError(NOT_COMPARED)
    return found


def _percentile(block: np.ndarray) -> np.ndarray:
    flat = block.ravel()
    ordered = np.sort(flat)  # NaN last
    present = int(np.count_nonzero(~np.isnan(flat)))
    below = np.searchsorted(ordered[:present], flat, "left")
    equal = np.searchsorted(ordered[:present], flat, "right") - below - 1
    share = 100 * (below + equal / 2) / max(present - 1, 1) if present > 1 else np.full(flat.shape, 50.0)
    return np.where(np.isnan(flat), np.nan, share).reshape(block.shape)


# -- in a result ---------------------------------------------------------------------------------------------


def attach(scores: Scores, measured: Effects) -> str | None:
    """Put effects into a result of the same model, replacing earlier ones; a note if the model cannot be compared."""
    check_same_heads(measured.ports, scores, "the model of these effects")
    doubt = same_model(scores.provenance, measured.model, "the result", "these effects")
    for name in [name for name in scores.extra if name.startswith(("effect/", PREFIX))]:
        del scores.extra[name]
    scores.extra |= {
        name: np.ascontiguousarray(values, dtype=np.float32) for name, values in _as_extra(measured).items()
    }
    model = {"model": identity(measured.model)} if measured.model else {}
    scores.annotations["effects"] = {**measured.protocol, "interrupted": measured.interrupted, **model}
    if measured.examples is not None:
        scores.annotations["effects"][EXAMPLES] = measured.examples.put_into(scores.extra)
    return doubt


def _as_extra(measured: Effects) -> dict[str, np.ndarray]:
    """The arrays of effects by their names in a result."""
    named = {f"effect/{name}/{pairing}": values for (name, pairing), values in measured.arrays.items()}
    named |= {f"effect/clean/{kind}": values for kind, values in measured.clean.items()}
    return named | {"effect/write_norms": measured.write_norms}


def effects_in(scores: Scores) -> Effects | None:
    """The effects that a result holds, or None; damaged ones are refused."""
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    clean: dict[str, np.ndarray] = {}
    norms = np.full(len(scores.heads(Role.O)), np.nan)
    for name, values in scores.extra.items():
        if not is_effect(name):
            continue
        _check_shape(name, values, effect_shape(name, scores.ports))
        measure, _, last = name.partition("/")[2].partition("/")
        if measure == "clean":
            clean[last] = values
        elif measure == "write_norms":
            norms = values
        else:
            arrays[measure, Pairing.parse(last)] = values
    if not arrays:
        return None
    held = scores.annotations.get("effects")
    protocol: dict[str, Any] = dict(held) if is_object(held) else {}
    _check_protocol(protocol)
    interrupted, model = protocol.pop("interrupted", False) is True, protocol.pop("model", None)
    examples = Examples.found_in(scores.extra, protocol.pop(EXAMPLES, None), scores.ports)
    order = {name: i for i, name in enumerate(("random", "text", "tokens"))}
    ordered = dict(sorted(arrays.items(), key=lambda item: (FLOW_PAIRINGS.index(item[0][1]), order.get(item[0][0], 9))))
    about = model or dict(scores.provenance)
    found = Effects(scores.ports, ordered, clean, norms, protocol, [], interrupted, about, examples)
    if not found.compared:
        found.notes.append(NOT_COMPARED)
    return found


def check_same_heads(table: PortTable, scores: Scores | None, reference: str) -> None:
    """Refuse a result whose heads are not those of the model."""
    if scores is None:
        return
    for role in (Role.O, Role.K):
        if tuple(scores.heads(role)) != tuple(table.of(role)):
            raise HeadspanError(
                f"this is a result of another model: its {len(scores.heads(role))} {role} heads are not the "
                f"{len(table.of(role))} of {reference}; give the model it was made from"
            )


def _check_shape(name: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    if values.shape != shape or values.dtype.kind != "f":
        raise HeadspanError(f"the result is damaged: {name} has shape {values.shape}, its heads need {shape}")


def _check_protocol(protocol: dict[str, Any]) -> None:
    """Refuse metadata of effects with impossible values."""

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < np.inf

    floors, tokens = protocol.get("floors", {}), protocol.get("tokens", {})
    right = {
        "floors": is_object(floors) and all(map(number, floors.values())),
        "least_ratio": number(protocol.get("least_ratio", LEAST_RATIO)),
        "tokens": is_object(tokens)
        and all(is_list(lengths) and all(map(number, lengths)) for lengths in tokens.values()),
    }
    ends = ((name, protocol.get(name, [])) for name in ("from", "to"))
    right |= {name: is_list(ports) and all(isinstance(port, str) for port in ports) for name, ports in ends}
    for name, good in right.items():
        if not good:
            raise HeadspanError(f"the result is damaged: {name} of its effects is {str(protocol[name])[:80]!r}")
