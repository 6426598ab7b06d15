"""Effects: which edges between heads a model uses, measured by exchanging what one head writes for one port of another.

One run of the model per sequence, then all edges (:mod:`headspan.analysis.edges` says what is measured exactly). It is
the direct edge alone: what reaches a head through other layers in between is not in it.

By default a model is run on random tokens said twice *and* on a short text of our own. ``effect`` is the larger of the
two, since an edge that is used on either is used; both stand beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import numpy as np

from headspan.analysis.edges import EdgeReader, SharedDirections
from headspan.analysis.measuring import EdgeMeasures, Measuring
from headspan.analysis.samples import KINDS, Sample, equal_windows, random_samples, token_pool
from headspan.errors import HeadspanError
from headspan.heads import FLOW_PAIRINGS, Pairing, PortTable, Role, forward_mask, layers_of, parse_pairings
from headspan.models.folding import fold
from headspan.models.identity import same_model
from headspan.models.replay import Replayer
from headspan.models.running import RunningModel, running
from headspan.scores import ScoreMatrix, Scores
from headspan.system.arguments import checked
from headspan.system.memory import default_memory, parse_memory
from headspan.system.progress import progress_bar
from headspan.system.tabular import Tabular

SEQUENCES, LENGTH, VOCABULARY = 4, 42, 20_000  # of the random tokens
TEXT_WINDOW = 128
USED_SHARE = 0.01  # of the edges of a pairing count as used: those with the largest effects
HAS_HABIT, LOST_SHARE = 0.2, 0.1  # a head score that a head has, and the part of it whose loss counts
Progress = Callable[[int, int], None]


@dataclass(repr=False)
class Effects(Tabular):
    """Measured edges: ``effects.of("OK")`` is (sources, targets), NaN where an edge was not measured.

    arrays: by (measure, pairing). Measures are the materials (``random``, ``text`` or ``tokens``), their largest value
    among the query heads of a shared key/value head (``random_largest`` …), and the change of the head scores.
    clean: head scores of the clean run. write_norms: mean length of what each head writes.
    model: provenance of the weights that ran, where they are known.
    """

    ports: PortTable
    arrays: dict[tuple[str, Pairing], np.ndarray]
    clean: dict[str, np.ndarray]
    write_norms: np.ndarray
    protocol: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        return tuple(dict.fromkeys(pairing for _, pairing in self.arrays))

    @property
    def materials(self) -> tuple[str, ...]:
        """What the model was run on."""
        return tuple(name for name in ("random", "text", "tokens") if any(name == key for key, _ in self.arrays))

    def of(self, pairing: Pairing | str, material: str | None = None) -> np.ndarray:
        """The effect of every edge of a pairing: on one material, or the larger of all."""
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

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per measured edge, the largest effect of each pairing first."""
        return self.records()

    def _headline(self) -> str:
        counts = ", ".join(f"{int((~np.isnan(self.of(p))).sum()):,} {p}" for p in self.pairings)
        return f"effects of {counts} edges, measured on {' and '.join(self.materials)}"

    def used(self, pairing: Pairing | str) -> np.ndarray:
        """True for edges that the model uses: among the 1 % of largest effects, or the target loses a habit."""
        values = self.of(pairing)
        present = values[~np.isnan(values)]
        if not len(present):
            return np.zeros(values.shape, dtype=bool)
        count = max(1, round(USED_SHARE * len(present)))
        with np.errstate(invalid="ignore"):
            return ((values >= np.partition(present, -count)[-count]) & (values > 0)) | self.lost(pairing)

    def lost(self, pairing: Pairing | str) -> np.ndarray:
        """True where the target loses more than a tenth of a head score that it has; a KV head has its group's mean."""
        pairing = Pairing.parse(pairing)
        shape = self.of(pairing).shape
        lost = np.zeros(shape, dtype=bool)
        for kind in KINDS:
            if (kind, pairing) in self.arrays and kind in self.clean:
                clean = self.clean[kind].reshape(shape[1], -1).mean(1)[None, :]
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
        self, scores: Scores | None = None, *, metric: str = "pk", k: int | None = None, by: str = "effect"
    ) -> list[dict[str, Any]]:
        """Rows of a table: the ``k`` edges of each pairing with the largest ``"effect"`` or ``"score"``.

        Head scores are given as their change; a negative one says that the target does less of it without the edge.
        """
        rows: list[dict[str, Any]] = []
        for pairing in self.pairings:
            scored = scores[metric, pairing].forward() if scores is not None and (metric, pairing) in scores else None
            rows += _records(self, pairing, scored, k, by)
        return rows


def _records(
    effects: Effects, pairing: Pairing, scored: ScoreMatrix | None, k: int | None, by: str
) -> list[dict[str, Any]]:
    matrix, percentiles = effects.matrix(pairing), effects.percentiles(pairing)
    values = matrix.values
    ranks = None if scored is None else _ranks(scored.values)
    order = values if by == "effect" or scored is None else np.where(np.isnan(values), np.nan, scored.values)
    rows, columns = np.nonzero(~np.isnan(values))
    best = np.argsort(-order[rows, columns], kind="stable")[:k]
    extra = [n for n in _columns(effects) if (n, pairing) in effects.arrays]
    table = []
    for i, j in zip(rows[best], columns[best], strict=True):
        names = (str(pairing), str(matrix.sources[i]), str(matrix.targets[j]))
        row: dict[str, Any] = dict(zip(("pairing", "source", "target"), names, strict=True))
        row["score"] = None if scored is None else float(scored.values[i, j])
        row["rank"] = None if ranks is None else int(ranks[i, j])
        row["effect"], row["percentile"] = float(values[i, j]), float(percentiles[i, j])
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
    return [name for name in names if name not in effects.materials or len(effects.materials) > 1]


def _ranks(values: np.ndarray) -> np.ndarray:
    """1 for the largest, ties in head order; NaN is last."""
    order = np.argsort(-values.ravel(), kind="stable")
    ranks = np.empty(values.size, dtype=np.int64)
    ranks[order] = np.arange(1, values.size + 1)
    return ranks.reshape(values.shape)


def _layer_blocks(matrix: ScoreMatrix) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns of the edges between each two layers."""
    source, target = layers_of(matrix.sources), layers_of(matrix.targets)
    return [
        (np.flatnonzero(source == a), np.flatnonzero(target == b))
        for a in np.unique(source) for b in np.unique(target) if a < b
    ]  # fmt: skip


def effects_of(scores: Scores) -> Effects:
    """The effects in a result, or one sentence on how to put them there."""
    found = effects_in(scores)
    if found is None:
        raise HeadspanError("this result holds no effects: measure them with headspan effects MODEL --into RESULT")
    return found


def _percentile(block: np.ndarray) -> np.ndarray:
    flat = block.ravel()
    ordered = np.sort(flat)  # NaN last
    present = np.count_nonzero(~np.isnan(flat))
    below = np.searchsorted(ordered[:present], flat, "left")
    equal = np.searchsorted(ordered[:present], flat, "right") - below - 1
    share = 100 * (below + equal / 2) / max(present - 1, 1) if present > 1 else np.full(flat.shape, 50.0)
    return np.where(np.isnan(flat), np.nan, share).reshape(block.shape)


# -- in a result ---------------------------------------------------------------------------------------------


def attach(scores: Scores, measured: Effects) -> str | None:
    """Put effects into a result of the same model, in place of those it had; a sentence where nobody can tell."""
    check_same_heads(measured.ports, scores, "the model of these effects")
    doubt = same_model(scores.provenance, measured.model, "the result", "these effects")
    for name in [name for name in scores.extra if name.startswith("effect/")]:
        del scores.extra[name]
    for (name, pairing), values in measured.arrays.items():
        scores.extra[f"effect/{name}/{pairing}"] = np.ascontiguousarray(values, dtype=np.float32)
    for kind, values in measured.clean.items():
        scores.extra[f"effect/clean/{kind}"] = np.ascontiguousarray(values, dtype=np.float32)
    scores.extra["effect/write_norms"] = np.ascontiguousarray(measured.write_norms, dtype=np.float32)
    scores.annotations["effects"] = {**measured.protocol, "interrupted": measured.interrupted}
    return doubt


def effects_in(scores: Scores) -> Effects | None:
    """The effects that a result holds, or None; damaged ones are refused."""
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    clean: dict[str, np.ndarray] = {}
    heads = len(scores.heads(Role.O))
    norms = np.full(heads, np.nan)
    for name, values in scores.extra.items():
        first, _, rest = name.partition("/")
        if first != "effect":
            continue
        measure, _, last = rest.partition("/")
        if measure in ("clean", "write_norms"):
            _check_shape(name, values, (heads,))
            if measure == "clean":
                clean[last] = values
            else:
                norms = values
            continue
        pairing = Pairing.parse(last)
        if pairing not in FLOW_PAIRINGS:
            raise HeadspanError(f"the result is damaged: it has effects of {pairing}, which is no edge of a circuit")
        _check_shape(name, values, (heads, len(scores.heads(pairing.target))))
        arrays[measure, pairing] = values
    if not arrays:
        return None
    protocol = scores.annotations.get("effects")
    protocol = dict(protocol) if isinstance(protocol, dict) else {}
    interrupted = protocol.pop("interrupted", False) is True
    order = {name: i for i, name in enumerate(("random", "text", "tokens"))}
    ordered = dict(sorted(arrays.items(), key=lambda item: (FLOW_PAIRINGS.index(item[0][1]), order.get(item[0][0], 9))))
    return Effects(scores.ports, ordered, clean, norms, protocol, [], interrupted, dict(scores.provenance))


def with_effects(rows: list[dict[str, Any]], scores: Scores) -> list[dict[str, Any]]:
    """Rows of edges with their effects, None where one was not measured; unchanged for a result without effects."""
    measured = effects_in(scores)
    if measured is None:
        return rows
    return [row | {"effect": measured.at(row["pairing"], row["source"], row["target"])} for row in rows]


def _check_shape(name: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    if values.shape != shape or values.dtype.kind != "f":
        raise HeadspanError(f"the result is damaged: {name} has shape {values.shape}, its heads need {shape}")


# -- measuring -----------------------------------------------------------------------------------------------


@checked
def effects(
    model: Any,
    scores: Scores | str | os.PathLike[str] | None = None,
    *,
    pairing: str | Pairing | Sequence[str | Pairing] = "flow",
    k: int | None = None,
    text: str | Sequence[str] | None = None,
    random: bool | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    ablate: str = "resample",
    shared: int | None = None,
    frozen_norm: bool = False,
    bos: str = "auto",
    sequences: int = SEQUENCES,
    length: int | None = None,
    seed: int = 0,
    memory: str | int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Effects:
    """Which edges a model uses: the effect of every OQ, OK and OV edge, without a forward pass per edge.

    Parameters
    ----------
    model : a model reference, a live transformers model, or a `RunningModel`.
    scores, k : with both, only the layer pairs that hold one of the ``k`` best PK edges of each pairing are measured.
    pairing : ``"flow"`` (OQ, OK and OV) or some of them.
    text : run on these texts (in windows of 128 tokens at most). random : run on random tokens said twice,
        ``sequences`` of 2·``length`` tokens. tokens : run on these token ids. By default: random tokens and our text.
    ablate : what takes the place of a head's write: ``"resample"``, ``"mean"`` or ``"zero"``.
    shared : exchange only the part along this many principal directions shared with the port (folded weights where
        the model can be folded).
    frozen_norm : keep the norm's division from the clean run.
    bos : beginning-of-sequence token in front: ``"auto"``, ``"yes"`` or ``"no"``.
    memory : bytes for recorded runs and exchanged inputs, beside the model itself: ``"2GB"`` …
    progress : called with (steps done, steps in all); a bar in a terminal or notebook by default.
    """
    pairings = parse_pairings(pairing)
    if any(p not in FLOW_PAIRINGS for p in pairings):
        raise HeadspanError(
            f"effects are measured for {', '.join(map(str, FLOW_PAIRINGS))}: what a head writes and another reads; "
            f"not for {', '.join(str(p) for p in pairings if p not in FLOW_PAIRINGS)}"
        )
    budget = default_memory() if memory is None else parse_memory(memory)
    scores = Scores.load(scores) if isinstance(scores, (str, os.PathLike)) else scores
    with progress_bar("measuring", progress) as update, running(model, device=device) as ready:
        replayer = Replayer(ready)
        if len(replayer.weights.layers) < 2:
            raise HeadspanError(f"{ready.reference} has one layer with attention: there are no edges between layers")
        check_same_heads(replayer.weights.ports, scores, ready.reference)
        notes = list(ready.notes)
        if scores is not None and (doubt := same_model(scores.provenance, ready.identity, "the result", "this model")):
            notes.append(doubt)
        materials = _materials(ready, text, random, tokens, bos, sequences, length, seed, notes)
        replayer.check(_ids_of(next(iter(materials.values()))[0]))
        wanted = _wanted(replayer, pairings, scores, k)
        reader = EdgeReader(replayer, ablate, frozen_norm=frozen_norm)
        directions = None if shared is None else _directions(replayer, shared, notes)
        steps = [len(samples) * len(replayer.weights.layers) for samples in materials.values()]
        found: dict[str, EdgeMeasures] = {}
        stopped = False
        for i, (name, samples) in enumerate(materials.items()):
            tell = _offset(update, sum(steps[:i]), sum(steps))
            try:
                found[name] = Measuring(reader, wanted, shared=directions, memory=budget, progress=tell).run(samples)
            except KeyboardInterrupt:  # before a layer was finished
                if not found:
                    raise
                stopped = True
            if stopped or found[name].interrupted:
                notes.append(_what_is_left(found, materials, len(replayer.weights.layers)))
                stopped = True
                break
        protocol = _protocol(ready, materials, ablate, shared, frozen_norm, bos, seed)
    measured = _assembled(replayer, found, pairings, protocol, notes, stopped)
    measured.model = dict(ready.identity)
    return measured


def _what_is_left(found: Mapping[str, EdgeMeasures], materials: Mapping[str, Any], layers: int) -> str:
    measured = [f"edges into {len(m.measured)} of {layers} layers on {name}" for name, m in found.items()]
    return f"stopped: measured were {', '.join(measured)}" + (
        "" if len(found) == len(materials) else f", none on {list(materials)[-1]}"
    )


def _offset(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def _ids_of(sample: Sample) -> Any:
    import torch

    return torch.from_numpy(sample.ids.astype(np.int64))


def check_same_heads(table: PortTable, scores: Scores | None, reference: str) -> None:
    """Refuse a result whose heads are not those of the model."""
    if scores is None:
        return
    for role in (Role.O, Role.K):
        if tuple(scores.heads(role)) != tuple(table.of(role)):
            raise HeadspanError(
                f"this is a result of another model: it has {len(scores.heads(role))} {role} heads where {reference} "
                f"has {len(table.of(role))}, or others"
            )


def _materials(
    model: RunningModel,
    text: str | Sequence[str] | None,
    random: bool | None,
    tokens: Sequence[Sequence[int]] | None,
    bos: str,
    sequences: int,
    length: int | None,
    seed: int,
    notes: list[str],
) -> dict[str, list[Sample]]:
    """The sequences to run on, by material."""
    start = model.start_token(bos)
    if tokens is not None:
        if text is not None or random:
            raise HeadspanError("tokens are run as they are given: give no text and no random tokens beside them")
        return {"tokens": [Sample(_checked_ids(model, ids), {}, {}) for ids in tokens]}
    found: dict[str, list[Sample]] = {}
    if random or (random is None and text is None):
        pool = token_pool(model, VOCABULARY, None, notes)
        room = (model.context or 10**9) - (start is not None)
        found["random"] = random_samples(model, pool, sequences, length or min(LENGTH, room // 2), seed, start)
    if text is not None:
        texts = [text] if isinstance(text, str) else list(text)
        found["text"] = _text_windows(model, texts, start)
    elif random is None:
        try:
            found["text"] = _text_windows(model, [shipped_text()], start)
        except HeadspanError as error:
            notes.append(f"measured on random tokens only: {error}")
    if not found:
        raise HeadspanError("there is nothing to run the model on: give a text, or random tokens")
    return found


def _checked_ids(model: RunningModel, ids: Sequence[int]) -> np.ndarray:
    array = np.asarray(ids)
    rows = int(model.model.get_input_embeddings().weight.shape[0])
    if array.ndim != 1 or len(array) < 2 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= rows:
        raise HeadspanError(f"a token sequence is a list of at least two ids from 0 to {rows - 1}")
    return array


def _text_windows(model: RunningModel, texts: Sequence[str], start: int | None) -> list[Sample]:
    longest = min(TEXT_WINDOW, model.context or TEXT_WINDOW) - (start is not None)
    windows = equal_windows([model.encode(text) for text in texts], longest)
    return [Sample(ids, {}, {}).behind(start) for ids in windows]


def shipped_text() -> str:
    """The short English text that a model is run on by default."""
    return (files("headspan") / "data" / "effects-text.txt").read_text(encoding="utf-8")


def _wanted(
    replayer: Replayer, pairings: Sequence[Pairing], scores: Scores | None, k: int | None
) -> dict[Role, np.ndarray]:
    """For each port, which source layers are measured into which target layers."""
    layers = np.array(replayer.weights.layers)
    forward = layers[:, None] < layers[None, :]
    wanted = {pairing.target: forward for pairing in pairings}
    if scores is None or k is None:
        return wanted
    place = {layer: i for i, layer in enumerate(replayer.weights.layers)}
    for pairing in pairings:
        chosen = np.zeros_like(forward)
        for edge in scores["pk", pairing].forward().top(k):
            chosen[place[edge.source.layer], place[edge.target.layer]] = True
        wanted[pairing.target] = chosen
    return wanted


def _directions(replayer: Replayer, shared: int, notes: list[str]) -> SharedDirections:
    weights = replayer.weights
    if weights.foldable:
        return SharedDirections(fold(weights), shared)
    notes.append(f"shared directions are those of the raw weights: {weights.not_foldable_reason}")
    return SharedDirections(weights, shared)


def _protocol(
    model: RunningModel,
    materials: Mapping[str, Sequence[Sample]],
    ablate: str,
    shared: int | None,
    frozen_norm: bool,
    bos: str,
    seed: int,
) -> dict[str, Any]:
    return {
        "ablate": ablate,
        "shared": shared,
        "frozen_norm": frozen_norm,
        "bos": model.start_token(bos),
        "seed": seed,
        "tokens": {name: [len(sample.ids) for sample in samples] for name, samples in materials.items()},
    }


def _assembled(
    replayer: Replayer,
    found: Mapping[str, EdgeMeasures],
    pairings: Sequence[Pairing],
    protocol: dict[str, Any],
    notes: list[str],
    stopped: bool,
) -> Effects:
    weights = replayer.weights
    table = weights.ports
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    clean: dict[str, np.ndarray] = {}
    for name, measures in found.items():
        for pairing in pairings:
            forward = forward_mask(table.of(Role.O), table.of(pairing.target))
            group = weights.n_heads // weights.n_kv_heads if pairing.target.shared else 1
            arrays |= _by_port(name, measures, pairing, group, forward)
        clean |= {kind: measures.clean[kind] for kind in measures.clean if kind not in clean}
    first = next(iter(found.values()))
    return Effects(table, arrays, clean, first.write_norms, protocol, notes, stopped)


def _by_port(
    material: str, measures: EdgeMeasures, pairing: Pairing, group: int, forward: np.ndarray
) -> dict[tuple[str, Pairing], np.ndarray]:
    """Measures of query heads as those of the port's heads: mean over a group, and the largest effect in it."""
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    for (name, role), values in measures.arrays.items():
        if role is not pairing.target:
            continue
        if name != "effect":
            values = values - measures.clean[name][None, :]
        grouped = values.reshape(len(values), -1, group)
        key = material if name == "effect" else name
        arrays[key, pairing] = np.where(forward, grouped.mean(-1), np.nan).astype(np.float32)
        if name == "effect" and group > 1:
            arrays[f"{material}_largest", pairing] = np.where(forward, grouped.max(-1), np.nan).astype(np.float32)
    return arrays
