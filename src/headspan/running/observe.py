"""One pass over some text: the statistics of every port that influence is computed from.

The model runs once per sequence, and each attention layer is then differentiated on its own. What is collected:
:mod:`headspan.results.observations`; how attention is differentiated: :mod:`headspan.running.attention_fisher`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

import headspan
from headspan.results.identity import identity
from headspan.results.observations import RunInput, Statistics, degrees
from headspan.running.attention_fisher import random_signs
from headspan.running.observation_sums import ObservationSums
from headspan.running.opening import RunningModel, running
from headspan.running.port_inputs import LATENT_NOTE
from headspan.running.replay import Replayer
from headspan.running.samples import OBSERVE_TEXT, Sample, built_in_text, random_material, text_material, token_material
from headspan.scoring.tiles import TileStore
from headspan.system.arguments import checked
from headspan.system.memory import check_room
from headspan.system.outputs import check_output
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, refuse_ignored, warn

DRAWS = 8  # sets of signs per query; more text reduces the error just as well
SEQUENCES = 16  # random sequences
_SAVE_EVERY = 20.0  # seconds between two saves of unfinished work
_STATE = "sums-0"
_STREAM = 1  # random sequences that are not those of effects, so that one can predict the other


@checked
def observe(
    model: Any,
    *,
    text: str | Sequence[str] | None = None,
    random: bool = False,
    tokens: Sequence[Sequence[int]] | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: bool = True,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    bos: str = "auto",
    device: str | None = None,
    dtype: str = "float32",
    progress: Update | None = None,
) -> Statistics:
    """Run a model once and collect the statistics that influence needs.

    Parameters
    ----------
    model : a model reference, a live transformers, PEFT or TransformerLens model, or a `RunningModel`.
    text : run on these texts, in windows of at most 128 tokens. random : run on random sequences repeated twice,
        ``sequences`` of 2·``length`` tokens. tokens : run on these token ids. By default a built-in text.
    out : write the statistics to this file; unfinished work stays in the cache folder until it is complete.
    resume : continue an interrupted run of the same model on the same input.
    seed : seed of the random sequences and of the signs. draws : sets of random signs for the Fisher information of
        every attention pattern (:mod:`headspan.running.attention_fisher`).
    bos : prepend the beginning-of-sequence token: ``"auto"``, ``"yes"`` or ``"no"``.
    dtype : type to compute in: ``"float32"`` (for any stored type), ``"bfloat16"``, ``"float16"``, or ``"stored"``.
    progress : called with (sequences done, all sequences); by default a bar in a terminal or notebook.
    """
    if draws < 1:
        raise HeadspanError(f"draws is {draws}. Give 1 or more")
    if out is not None:
        check_output(out, "statistics", inputs=[model], force=force, ending=".safetensors")
    with progress_bar("observing", progress) as update, running(model, device=device, dtype=dtype) as ready:
        replayer = Replayer(ready, "statistics")
        notes = [*ready.notes, *([LATENT_NOTE] if replayer.latent else [])]
        kind, samples = _material(ready, text, random, tokens, ready.start_token(bos), sequences, length, seed, notes)
        ids = [np.ascontiguousarray(sample.ids, dtype="<i8") for sample in samples]
        ran_on: RunInput = {
            "kind": kind,
            "sequences": len(samples),
            "tokens": sum(map(len, ids)),
            "sha256": hashlib.sha256(
                b"".join(len(one).to_bytes(8, "little") + one.tobytes() for one in ids)
            ).hexdigest(),
        }
        protocol = {"seed": seed, "draws": draws, "bos": ready.start_token(bos), "dtype": ready.dtype}
        sums = ObservationSums(replayer, max(map(len, ids)), partial(random_signs, draws, seed))
        check_room(f"observing {ready.reference}", 2 * sums.nbytes)
        replayer.check(samples[0].tensor)
        about = [identity(ready.identity), ran_on, protocol, headspan.__version__]
        with TileStore(out, json.dumps(about)) if out is not None else nullcontext() as store:
            if store is not None and resume:
                sums.restore(store.load(_STATE, most=sums.nbytes) or {})
            _run(sums, samples, store, update)
            arrays, counts = sums.arrays()
            found = Statistics(
                replayer.weights.ports,
                arrays,
                counts,
                [ran_on],
                {**identity(ready.identity), "reference": ready.reference},
                protocol,
                list(dict.fromkeys(notes)),
            )
            if out is not None:
                found.save(out, force=force)
    for sentence in dict.fromkeys(notes):
        warn(sentence)
    return found


def _material(
    model: RunningModel,
    text: str | Sequence[str] | None,
    random: bool,
    tokens: Sequence[Sequence[int]] | None,
    start: int | None,
    sequences: int | None,
    length: int | None,
    seed: int,
    notes: list[str],
) -> tuple[str, list[Sample]]:
    """The sequences to run on, and what kind they are."""
    if (text is not None) + random + (tokens is not None) > 1:
        raise HeadspanError("`text`, `random` and `tokens` exclude each other. Give one of them")
    if not random:
        refuse_ignored("without random sequences", sequences=sequences, length=length)
    if tokens is not None:
        kind, found = "tokens", token_material(model, tokens)
    elif text is not None:
        kind, found = "text", text_material(model, start, text)
    elif not random:
        try:
            kind, found = "text", text_material(model, start, built_in_text(OBSERVE_TEXT))
        except HeadspanError as error:
            notes.append(f"{model.reference} ran on random sequences: {error}")
            kind, found = "random", random_material(model, start, SEQUENCES, None, seed, notes, _STREAM)
    else:
        number = sequences or SEQUENCES
        kind, found = "random", random_material(model, start, number, length, seed, notes, _STREAM)
    counts = np.bincount(np.concatenate([np.arange(len(sample.ids)) for sample in found])) if found else np.zeros(1)
    if degrees(counts) < 1:
        raise HeadspanError("statistics compare sequences at the same position. Give at least two")
    if len({sample.ids.tobytes() for sample in found}) < 2:
        raise HeadspanError("statistics compare different sequences, and all of these are the same")
    return kind, found


def _run(sums: ObservationSums, samples: Sequence[Sample], store: TileStore | None, update: Update) -> None:
    """Add the sequences that are missing, and save unfinished work now and then."""
    saved = time.monotonic()
    update(sums.done, len(samples))
    for sample in samples[sums.done :]:
        sums.add(sample.ids, sums.replayer.record(sample.tensor))
        update(sums.done, len(samples))
        if store is not None and time.monotonic() - saved > _SAVE_EVERY and sums.done < len(samples):
            store.save(_STATE, sums.sums)
            saved = time.monotonic()
