"""Effects of edges between heads: patch one head's output as seen by one Q, K or V input of a later head.

The model runs once per sequence, then all edges are measured (:mod:`headspan.running.edge_effects` defines how). An
effect is that of the direct edge: paths through layers in between are not included.

By default a model runs on random sequences repeated twice *and* on a short built-in text. ``effect`` is the larger of
the two; both are reported. Which effects are large: :mod:`headspan.results.large_effects`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from headspan.models.folding import fold
from headspan.models.opening import ModelLike, open
from headspan.results.choices import labels_for
from headspan.results.effects import Effects, attach, check_same_heads, effects_in, effects_of
from headspan.results.effects_fields import with_effects
from headspan.results.identity import same_model
from headspan.results.labels import LabelsLike, classes_by_name
from headspan.results.large_effects import DRAWS, FLOORS
from headspan.results.matrix import ScoreMatrix
from headspan.results.scores import Scores
from headspan.running.edge_effects import EdgeReader, SharedDirections
from headspan.running.effect_sums import EdgeMeasures, Measuring, by_port
from headspan.running.examples import examples_of
from headspan.running.opening import RunningModel, running
from headspan.running.port_inputs import LATENT_NOTE, Receiver
from headspan.running.random_writes import RandomWrites
from headspan.running.replay import Replayer
from headspan.running.samples import EFFECTS_TEXT, Sample, built_in_text, random_material, text_material, token_material
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.memory import default_memory, parse_memory
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.ends import Ends, EndsLike, given_ends
from headspan.vocabulary.errors import HeadspanError, refuse_ignored
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Pairing, Role, forward_mask, parse_pairings
from headspan.vocabulary.ports import PortTable

__all__ = [
    "Effects",
    "attach",
    "check_same_heads",
    "effects",
    "effects_in",
    "effects_of",
    "with_effects",
]

SEQUENCES = 4  # random ones


@checked
def effects(
    model: ModelLike,
    scores: Scores | str | os.PathLike[str] | None = None,
    *,
    pairing: str | Pairing | Sequence[str | Pairing] = "flow",
    k: int | None = None,
    from_: EndsLike | None = None,
    to: EndsLike | None = None,
    labels: LabelsLike | None = None,
    text: str | Sequence[str] | None = None,
    random: bool | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    ablate: str = "resample",
    shared: int | None = None,
    frozen_norm: bool = False,
    floor: float | None = None,
    draws: int | None = None,
    bos: str = "auto",
    sequences: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    into: str | os.PathLike[str] | None = None,
    memory: str | int | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Update | None = None,
) -> Effects:
    """The effect of every OQ, OK and OV edge, and which effects are large, without a forward pass per edge.

    Parameters
    ----------
    model : a model reference, opened weights, a live transformers, PEFT or TransformerLens model, or a `RunningModel`.
    scores, k : with both, only the layer pairs with one of the ``k`` best PK edges of each pairing are measured.
    pairing : ``"flow"`` (OQ, OK and OV) or some of them.
    from_, to : list only edges that start or end here: a head (``"L5H1"``), a port (``"L5H1.K"``), a layer (``"L5"``),
        a class of ``labels``, or a list of them. Only their layers are measured.
    labels : head classes, or the name or CSV file of some; they become columns of the rows.
    text : run on these texts (in windows of at most 128 tokens). random : run on random sequences repeated twice,
        ``sequences`` of 2·``length`` tokens. tokens : run on these token ids. By default: random and a built-in text.
    ablate : what replaces a head's output: ``"resample"``, ``"mean"`` or ``"zero"``.
    shared : patch only the component along this many principal directions shared with the port (of folded weights, if
        the model can be folded).
    frozen_norm : keep the normalisation scale of the clean run.
    floor : the smallest large effect, in the unit of each pairing; by default 0.05 (total variation) for OQ and OK, 0.1
        (relative norm) for OV. draws : random outputs to compare an effect at or above it with; 0 for none. With
        ``shared`` there are none, because only a component of the output is patched. Default: 8.
    bos : prepend the beginning-of-sequence token: ``"auto"``, ``"yes"`` or ``"no"``.
    into : a result file of this model (``headspan.score``) to store the effects in.
    memory : memory limit for recorded runs and patched inputs, in addition to the model: ``"2GB"`` …
    dtype : type to compute in: ``"float32"`` (for any stored type), ``"bfloat16"``, ``"float16"``, or
        ``"stored"``.
    progress : called with (steps done, all steps); by default a bar in a terminal or notebook.
    """
    pairings = parse_pairings(pairing)
    if draws is not None and draws < 0:
        raise HeadspanError(f"draws is {draws}. Give 0 or more")
    compared = 0 if shared is not None else DRAWS if draws is None else draws
    _refuse_unused(scores, k, text, random, tokens, bos, sequences, length, seed, shared, draws, floor)
    sequences, seed = SEQUENCES if sequences is None else sequences, seed or 0
    if any(p not in FLOW_PAIRINGS for p in pairings):
        raise HeadspanError(
            f"effects are measured for {', '.join(map(str, FLOW_PAIRINGS))} only, "
            f"not for {', '.join(str(p) for p in pairings if p not in FLOW_PAIRINGS)}"
        )
    budget = default_memory() if memory is None else parse_memory(memory)
    scores = Scores.load(scores) if isinstance(scores, (str, os.PathLike)) else scores
    store = None if into is None else Scores.load(into)
    if isinstance(model, (str, os.PathLike)):  # report a model or result that cannot be used before loading it
        with open(model) as weights:
            for result in (scores, store):
                check_same_heads(weights.ports, result, str(model))
    with progress_bar("measuring", progress) as update, running(model, device=device, dtype=dtype) as ready:
        replayer = Replayer(ready)
        if len(replayer.weights.layers) < 2:
            raise HeadspanError(f"{ready.reference} has one attention layer, so there are no edges between layers")
        notes = [*ready.notes, *([LATENT_NOTE] if replayer.latent else [])]
        for result, called in ((scores, "the result"), (store, str(into))):
            check_same_heads(replayer.weights.ports, result, ready.reference)
            if result is not None and (doubt := same_model(result.provenance, ready.identity, called, "this model")):
                notes.append(doubt)
        table = replayer.weights.ports
        classes = labels_for(labels, table, {"reference": ready.reference, **ready.identity}, scores or store)
        ends = given_ends(from_, to, table, classes)
        ends.check(pairings)
        materials = _materials(ready, text, random, tokens, bos, sequences, length, seed, notes)
        replayer.check(next(iter(materials.values()))[0].tensor)
        wanted = _wanted(replayer, pairings, scores, k, ends)
        if ends and not any(chosen.any() for chosen in wanted.values()):
            raise HeadspanError(f"no edge goes {ends}: edges go from a layer to a later one. Choose other ends")
        reader = EdgeReader(replayer, ablate, frozen_norm=frozen_norm)
        directions = None if shared is None else _directions(replayer, shared, notes)
        writes = RandomWrites(reader, _floors(pairings, floor), compared, seed, budget)
        found, turned, stopped = _measured(reader, materials, wanted, directions, writes, budget, update)
        if stopped:
            notes.append(_what_is_left(found, turned, materials, len(replayer.weights.layers)))
        protocol = _protocol(ready, materials, ablate, shared, frozen_norm, bos, seed) | writes.protocol | ends.names()
        if replayer.latent:
            protocol["frozen_latent_norms"] = True
        measured = _assembled(replayer, found, pairings, protocol, notes, stopped)
        measured.arrays |= turned
        measured.model = dict(ready.identity)
        measured.classes = classes_by_name(classes)
        if not stopped and shared is None:
            with suppress(KeyboardInterrupt):  # the effects themselves are complete
                measured.examples = examples_of(ready, reader, materials, measured, store or scores, seed)
    if store is not None and into is not None:
        attach(store, measured)
        store.save(into)
    return measured


def _refuse_unused(
    scores: Any, k: Any, text: Any, random: bool | None, tokens: Any, bos: str,
    sequences: Any, length: Any, seed: Any, shared: Any, draws: int | None, floor: Any,
) -> None:  # fmt: skip
    """Refuse arguments that the others leave without effect."""
    if scores is None:
        refuse_ignored("without scores to choose the edges by", k=k)
    if shared is not None:
        refuse_ignored("with `shared`, which has no random outputs to compare with", draws=draws or None)
    if shared is not None or draws == 0:
        refuse_ignored("without comparison with random outputs", floor=floor)
    if tokens is not None:
        refuse_ignored("with `tokens`", bos=None if bos in ("auto", "no") else bos)
    if tokens is not None or random is False or (random is None and text is not None):
        refuse_ignored("without random sequences. Add `random=True`", sequences=sequences, length=length)
        if shared is not None or draws == 0:
            refuse_ignored("without random sequences or random outputs", seed=seed)


def _measured(
    reader: EdgeReader,
    materials: Mapping[str, Sequence[Sample]],
    wanted: dict[Receiver, np.ndarray],
    directions: SharedDirections | None,
    writes: RandomWrites,
    budget: int,
    update: Update,
) -> tuple[dict[str, EdgeMeasures], dict[tuple[str, Pairing], np.ndarray], bool]:
    """By material: measured effects and those of random outputs; True if Ctrl-C ended the run early."""
    found: dict[str, EdgeMeasures] = {}
    turned: dict[tuple[str, Pairing], np.ndarray] = {}
    rounds, layers, done = 1 + writes.draws, len(reader.weights.layers), 0
    total = rounds * layers * sum(map(len, materials.values()))
    for name, samples in materials.items():
        tell = [_offset(update, done + i * layers * len(samples), total) for i in range(rounds)]
        done += rounds * layers * len(samples)
        try:
            found[name] = Measuring(reader, wanted, shared=directions, memory=budget, progress=tell[0]).run(samples)
            if found[name].interrupted:
                return found, turned, True
            turned |= writes.on(name, samples, found[name], tell[1:])
        except KeyboardInterrupt:  # before a layer was finished, or during the random outputs
            if not found:
                raise
            return found, turned, True
    return found, turned, False


def _floors(pairings: Sequence[Pairing], floor: float | None) -> dict[Pairing, float]:
    if floor is not None and not 0 < floor < np.inf:
        raise HeadspanError(f"A floor of {floor} is not possible. Give a number above 0, such as 0.05")
    return {pairing: FLOORS[pairing.target] if floor is None else floor for pairing in pairings}


def _what_is_left(
    found: Mapping[str, EdgeMeasures],
    turned: Mapping[tuple[str, Pairing], Any],
    materials: Mapping[str, Any],
    layers: int,
) -> str:
    measured = [f"edges into {len(m.measured)} of {layers} layers on {name}" for name, m in found.items()]
    compared = {name for name, _ in turned}
    untested = [name for name in found if f"{name}_turned" not in compared]
    return (
        f"stopped early, after {', '.join(measured)}"
        + ("" if len(found) == len(materials) else f", none on {list(materials)[-1]}")
        + (f"; on {' and '.join(untested)} effects were not compared with random outputs" if untested else "")
    )


def _offset(progress: Update, before: int, total: int) -> Update:
    return lambda done, _: progress(before + done, total)


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
            raise HeadspanError("tokens cannot be combined with text or random. Give one of them")
        return {"tokens": token_material(model, tokens)}
    found: dict[str, list[Sample]] = {}
    if random or (random is None and text is None):
        found["random"] = random_material(model, start, sequences, length, seed, notes)
    if text is not None:
        found["text"] = text_material(model, start, text)
    elif random is None:
        try:
            found["text"] = text_material(model, start, built_in_text(EFFECTS_TEXT))
        except HeadspanError as error:
            notes.append(f"measured on random sequences only: {error}")
    if not found:
        raise HeadspanError("there is nothing to run the model on. Give a text, or random sequences")
    return found


def _wanted(
    replayer: Replayer, pairings: Sequence[Pairing], scores: Scores | None, k: int | None, ends: Ends
) -> dict[Receiver, np.ndarray]:
    """For each receiver, the source heads and target layers to measure: whole layers."""
    layers = np.array(replayer.weights.layers)
    place = {layer: i for i, layer in enumerate(replayer.weights.layers)}
    wanted: dict[Receiver, np.ndarray] = {}
    for pairing in pairings:
        chosen = layers[:, None] < layers[None, :]
        best = None if scores is None or k is None else scores[PK, pairing]
        if ends or best is not None:
            edges = _edges(replayer.weights.ports, pairing, ends, best, k)
            chosen = np.zeros_like(chosen)
            for source, target in edges:
                chosen[place[source.layer], place[target.layer]] = True
        by_head = np.repeat(chosen, replayer.weights.n_heads, axis=0)
        wanted |= {receiver: by_head for receiver in replayer.receivers if receiver.role is pairing.target}
    return wanted


def _edges(
    ports: PortTable, pairing: Pairing, ends: Ends, best: ScoreMatrix | None, k: int | None
) -> Iterator[tuple[Head, Head]]:
    """The forward edges of a pairing with these ends: all of them, or the k that score best."""
    sources, targets = (ports.of(role) for role in pairing)
    allowed = ends.mask(pairing, sources, targets) & forward_mask(sources, targets)
    if best is None:
        return ((sources[i], targets[j]) for i, j in np.argwhere(allowed))
    found = replace(best, values=np.where(allowed, best.values, np.nan)).top(k or 0)
    return ((edge.source, edge.target) for edge in found)  # type: ignore[misc]


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
    table = replayer.weights.ports
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    clean: dict[str, np.ndarray] = {}
    for name, measures in found.items():
        for pairing in pairings:
            forward = forward_mask(table.of(Role.O), table.of(pairing.target))
            arrays |= by_port(name, measures, pairing, table, forward)
        clean |= {kind: measures.clean[kind] for kind in measures.clean if kind not in clean}
    first = next(iter(found.values()))
    return Effects(table, arrays, clean, first.write_norms, protocol, notes, stopped)
