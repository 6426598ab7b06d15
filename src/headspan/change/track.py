"""One pass over the checkpoints of a training run: `headspan.track`.

The last checkpoint is opened first, since every step is compared with it, then the others in order, each once. Only
scores, drifts and hubs of a step are kept. The bases of the last and of the previous step are on disk with the other
unfinished work; one role of one layer is in memory at a time. A finished step is a file there, so an interrupted run
continues after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

import headspan
from headspan.change.series import Series
from headspan.change.series_steps import assembled
from headspan.change.step_store import Arrays, Shelf
from headspan.checkpoints.hub.downloads import Downloads
from headspan.checkpoints.hub.revisions import Checkpoint, find_checkpoints
from headspan.models.folding import fold as folded
from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.results.scores import Scores, is_result
from headspan.scoring.run import score
from headspan.scoring.tiles import TileStore
from headspan.statistics.hubs import hubs
from headspan.subspaces.bases import orthonormal_bases, span_drift
from headspan.subspaces.metrics import PK
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.ordering import descending
from headspan.system.outputs import check_output
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, inform, refuse_ignored
from headspan.vocabulary.heads import FLOW_PAIRINGS, ROLES, Pairing, Role

ALL_SCORES = 256 * 2**20  # bytes up to which all scores of all steps are kept during the run
SOME_SCORES = 1000  # otherwise this many per step and pairing, or k if larger


@renamed(refs="model")
@checked
def track(
    model: ModelLike | Iterable[ModelLike],
    out: str | os.PathLike[str] | None = None,
    *,
    steps: Sequence[int] | None = None,
    last: int | None = None,
    fold: bool = False,
    k: int | None = None,
    run: bool = False,
    keep: bool = False,
    allow_duplicates: bool = False,
    memory: str | int | None = None,
    force: bool = False,
    progress: Update | None = None,
) -> Series:
    """Follow edges, heads and hubs through the checkpoints of a training run.

    model: references in order, or patterns like ``"org/name@step*"`` (revisions of the hub) and ``"run/step*"``; or the
        file of a finished series, which is loaded.
    out: write the series to this file; finished steps stay in the cache folder until then. Without it the bases
        of two steps are held in memory.
    steps, last: use only these step numbers; use only the last checkpoints.
    fold: fold the norms into the weights first.
    k: keep edges that are among the strongest k (20 by default) of their pairing at some step.
    run: also run every checkpoint and keep its head scores.
    keep: keep downloaded files in the hub's cache; otherwise the files of a step are removed after it.
    allow_duplicates: accept checkpoints with equal attention weights as different steps.
    force: overwrite a file that is not a result (never an input).
    """
    if out is None and _is_text(model) and is_result(model):
        options = {"steps": steps, "last": last, "k": k, "fold": fold, "run": run, "keep": keep, "memory": memory}
        refuse_ignored("on a saved series", **options, allow_duplicates=allow_duplicates)
        return Series.load(model)
    k = 20 if k is None else k
    if k < 1:
        raise HeadspanError(f"k is {k}. Give 1 or more")
    checkpoints = find_checkpoints(model, steps=steps, last=last)
    if run and not all(_is_text(c.ref) for c in checkpoints):
        raise HeadspanError("head scores of a series need references that can be opened again. Give paths or hub ids")
    if out is not None:
        check_output(out, "series", inputs=[c.ref for c in checkpoints if _is_text(c.ref)], force=force)
    key = _key(checkpoints, fold, k, run)
    with (
        TileStore(out, key) if out is not None else nullcontext() as store,
        progress_bar("tracking", progress) as tell,
    ):
        tracker = _Tracker(checkpoints, Shelf(store), fold, k, run, keep, allow_duplicates, memory)
        series = tracker.series(tell)
        if out is not None:
            series.save(out, force=force)
    return series


def _key(checkpoints: Sequence[Checkpoint], fold: bool, k: int, run: bool) -> str:
    """A key that is equal for the same, unchanged checkpoints and the same options."""
    parts = [[c.name, c.step, c.commit or _stamp(c.ref)] for c in checkpoints]
    text = json.dumps([headspan.__version__, parts, fold, k, run])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _stamp(ref: Any) -> Any:
    """Names, sizes and times of local files; they show whether a checkpoint was replaced between two runs."""
    if not _is_text(ref):
        return id(ref)  # an object in memory: no other run can continue with it
    path = Path(os.path.expanduser(ref))
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    stats = ((file.name, file.stat()) for file in files if file.is_file())
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _is_text(ref: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(ref, (str, os.PathLike))


class _NoSeries(HeadspanError):
    """Checkpoints that do not belong together; running the same command again would not help."""


class _Tracker:
    """One run over a series."""

    def __init__(
        self, checkpoints: list[Checkpoint], shelf: Shelf, fold: bool, k: int, run: bool, keep: bool,
        allow_duplicates: bool, memory: str | int | None,
    ) -> None:  # fmt: skip
        self.checkpoints, self.shelf = checkpoints, shelf
        self.fold, self.k, self.run, self.keep = fold, k, run, keep
        self.allow_duplicates, self.memory = allow_duplicates, memory
        self.final = len(checkpoints) - 1
        self.seen: dict[str, str] = {}  # content -> name
        self.notes: list[str] = []
        self.shape: dict[str, Any] = {}  # of the last checkpoint: what all others must have
        self.chosen: dict[Pairing, np.ndarray] = {}  # flat indices of the strongest edges at the last step

    def series(self, progress: Update) -> Series:
        done: dict[int, tuple[dict[str, Any], Arrays]] = {}
        order = [self.final, *range(self.final)]
        for count, place in enumerate(order):
            kept = self._kept(place)
            if count == 1 and kept is not None:
                finished = sum(self._kept(i) is not None for i in order)
                inform(f"continuing an unfinished series: {finished} of {len(order)} steps are done")
            if kept is None:
                kept = self._measured(place, count)
            self._learn(place, *kept)
            done[place] = kept
            if 0 < place < self.final:
                self._drop_bases(place - 1)
            progress(count + 1, len(order))
        previous = dict(self._compare(self.final - 1, self.final))
        done[self.final][1].update({f"from_previous/{role}": values for role, values in previous.items()})
        parts = [done[place] for place in range(len(order))]
        return assembled(self.checkpoints, parts, self.k, self.chosen, self.notes)

    # -- one step --------------------------------------------------------------------------------------------

    def _kept(self, place: int) -> tuple[dict[str, Any], Arrays] | None:
        """The measurements of an earlier run at a step, if complete."""
        arrays = self.shelf.load(f"step-{place}")
        if arrays is None or "info" not in arrays:
            return None
        return json.loads(arrays.pop("info").tobytes()), arrays

    def _learn(self, place: int, info: dict[str, Any], arrays: Arrays) -> None:
        """Remember what the following steps need from a step."""
        if place == self.final:
            self.shape = info["shape"]
            self.chosen = {p: arrays[f"index/{p}"][: self.k] for p in FLOW_PAIRINGS}
        self._refuse_duplicate(info["content"], self.checkpoints[place].name)
        self.seen.setdefault(info["content"], self.checkpoints[place].name)
        self.notes += [note for note in info["notes"] if note not in self.notes]

    def _refuse_duplicate(self, content: str, name: str) -> None:
        other = self.seen.get(content, name)
        if other == name:
            return
        message = f"{other} and {name} have equal attention weights, like one checkpoint under two names"
        if not self.allow_duplicates:
            raise _NoSeries(f"{message}. Leave one out, or add `allow_duplicates=True`")
        if message not in self.notes:
            self.notes.append(message)

    def _measured(self, place: int, done: int) -> tuple[dict[str, Any], Arrays]:
        checkpoint = self.checkpoints[place]
        try:
            with self._downloads(place), self._opened(checkpoint) as weights:
                info, arrays = self._measure(place, weights)
                if self.run:
                    arrays |= self._head_scores(checkpoint, weights)
        except HeadspanError as error:
            where = "" if checkpoint.name in str(error) else f"{checkpoint.name}: "
            kept = f" ({done} of {len(self.checkpoints)} steps are kept; run the same command again to continue)"
            again = done and not isinstance(error, _NoSeries)
            raise HeadspanError(f"{where}{error}{kept if again else ''}") from error
        text = np.frombuffer(json.dumps(info).encode(), dtype=np.uint8)
        self.shelf.save(f"step-{place}", {**arrays, "info": text})
        return info, arrays

    def _downloads(self, place: int) -> Any:
        """Free the disk space of a step, even if an earlier run started it."""
        checkpoint, name = self.checkpoints[place], f"downloads-{place}"
        if self.keep or checkpoint.hub is None or checkpoint.commit is None:
            return nullcontext()
        known = self.shelf.load(name)
        before = None if known is None else json.loads(known["before"].tobytes())
        downloads = Downloads(checkpoint.hub, checkpoint.commit, before)
        text = json.dumps(sorted(downloads.before)).encode()
        self.shelf.save(name, {"before": np.frombuffer(text, dtype=np.uint8)})
        stack = ExitStack()
        stack.callback(self.shelf.drop, name)
        stack.enter_context(downloads)
        return stack

    @contextmanager
    def _opened(self, checkpoint: Checkpoint) -> Iterator[AttentionWeights]:
        if isinstance(checkpoint.ref, AttentionWeights):
            yield folded(checkpoint.ref) if self.fold and checkpoint.ref.folding == "none" else checkpoint.ref
            return
        with open(checkpoint.ref) as weights:
            yield folded(weights) if self.fold else weights

    def _measure(self, place: int, weights: AttentionWeights) -> tuple[dict[str, Any], Arrays]:
        shape = _shape(weights)
        self._check_shape(shape, weights)
        arrays, content = self._drifts(place, weights)
        self._refuse_duplicate(content, self.checkpoints[place].name)
        scores = score(weights, PK, "flow", memory=self.memory)
        weights.check_unchanged()
        for pairing in FLOW_PAIRINGS:
            arrays |= self._edges(scores, pairing)
        info = {"content": content, "shape": shape, "notes": weights.notes, "fingerprint": weights.fingerprint()}
        info |= {"folding": weights.folding, "architecture": weights.architecture}
        info |= {name: scores.provenance[name] for name in ("centred", "not_centred")}
        info["dimensions"] = {str(role): int(ranks.max(initial=0)) for role, ranks in scores.role_ranks.items()}
        return info, arrays

    def _check_shape(self, shape: dict[str, Any], weights: AttentionWeights) -> None:
        for what, seen in shape.items():
            if seen != self.shape.get(what, seen):
                described = "other heads" if isinstance(seen, dict) else f"{what} {seen}, not {self.shape[what]}"
                raise _NoSeries(
                    f"{weights.reference} has {described} as in {self.checkpoints[-1].name}: a series is of one model"
                )

    def _drifts(self, place: int, weights: AttentionWeights) -> tuple[Arrays, str]:
        """Drift from the previous and the last step, and the hash of the weights; the bases stay in the store."""
        content = self._save_bases(place, weights)
        arrays: Arrays = {}
        others = {"from_last": self.final} | ({"from_previous": place - 1} if 0 < place < self.final else {})
        for name, other in others.items():  # the previous step of the last one is not known yet
            arrays |= {f"{name}/{role}": values for role, values in self._compare(other, place, weights.layers)}
        return arrays, content

    def _save_bases(self, place: int, weights: AttentionWeights) -> str:
        """Store the bases of all heads; return the hash of their weights."""
        digest = hashlib.sha256()
        for layer in weights.layers:
            for role in ROLES:
                read = weights.read(role, layer)
                digest.update(np.ascontiguousarray(read).view(np.uint8).data)
                bases, _ = orthonormal_bases(read, weights.storage_dtype(role, layer))
                self.shelf.save(_bases_name(place, role, layer), {"bases": bases.astype(np.float32)})
        return digest.hexdigest()

    def _load_bases(self, place: int, role: Role, layer: int) -> np.ndarray:
        name = _bases_name(place, role, layer)
        found = self.shelf.load(name)
        if found is None:  # the stored bases were damaged: compute them again
            with self._downloads(place), self._opened(self.checkpoints[place]) as weights:
                self._save_bases(place, weights)
            found = self.shelf.load(name)
            assert found is not None  # the store falls back to memory
        return found["bases"].astype(np.float64)

    def _drop_bases(self, place: int) -> None:
        for layer in self.shape["layers"]:
            for role in ROLES:
                self.shelf.drop(_bases_name(place, role, layer))

    def _compare(
        self, first: int, second: int, layers: Sequence[int] | None = None
    ) -> Iterator[tuple[Role, np.ndarray]]:
        """Drift of every head between the bases of two steps, role by role."""
        for role in ROLES:
            parts: list[np.ndarray] = []
            for layer in layers if layers is not None else self.shape["layers"]:
                a, b = (self._load_bases(place, role, layer) for place in (first, second))
                ranks = [np.any(bases, axis=1).sum(axis=1) for bases in (a, b)]
                parts.append(span_drift(a, ranks[0], b, ranks[1])[0])
            yield role, np.concatenate(parts).astype(np.float32)

    def _edges(self, scores: Scores, pairing: Pairing) -> Arrays:
        """The strongest edges of one pairing (or all, if few), those of the last step, and the hubs."""
        matrix = scores[PK, pairing].forward()
        flat = matrix.values.ravel()
        order = descending(flat)[: np.count_nonzero(~np.isnan(flat))]
        if order.size * 8 * len(FLOW_PAIRINGS) * len(self.checkpoints) > ALL_SCORES:
            order = order[: max(SOME_SCORES, self.k)]
        arrays = {f"index/{pairing}": order.astype(np.int64), f"score/{pairing}": flat[order]}
        if pairing in self.chosen:
            arrays[f"chosen/{pairing}"] = flat[self.chosen[pairing]]
        if order.size:
            found = hubs(scores, pairing)
            arrays |= {f"inlet/{pairing}": found.inlet.values, f"outlet/{pairing}": found.outlet.values}
        return arrays

    def _head_scores(self, checkpoint: Checkpoint, weights: AttentionWeights) -> Arrays:
        from headspan.running.behaviour import behaviour

        found = behaviour(checkpoint.ref)
        if tuple(found.heads) != tuple(weights.heads(Role.Q)):
            raise HeadspanError(f"{checkpoint.name} runs with different heads than its weights have")
        return {f"head/{kind}": values.astype(np.float32) for kind, values in found.arrays.items()}


def _bases_name(place: int, role: Role, layer: int) -> str:
    return f"bases_{str(role).lower()}{layer}-{place}"


def _shape(weights: AttentionWeights) -> dict[str, Any]:
    """The properties that all checkpoints of one run share, as JSON values."""
    return {
        "d_model": weights.d_model,
        "layers": list(weights.layers),
        "heads": {str(role): [str(head) for head in weights.heads(role)] for role in ROLES},
        "served_by": {str(head): str(kv) for head, kv in weights.ports.served_by.items()},
    }
