"""One pass over the checkpoints of a training run: `headspan.track`.

The last checkpoint is opened first, since every step is compared with it; then the others in order, each opened once.
What is kept of a step is small: scores, drifts, hubs. The bases of the last step and of the step before lie on disk
beside the result, one role of one layer is in memory at a time. A finished step is a file, so a run that was stopped
goes on after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import headspan
from headspan.analysis.drift import span_drift
from headspan.analysis.hubs import hubs
from headspan.analysis.series import Series, SeriesEdge, Step
from headspan.errors import HeadspanError
from headspan.heads import FLOW_PAIRINGS, ROLES, Head, Pairing, Role
from headspan.models.folding import fold as folded
from headspan.models.weights import AttentionWeights, open
from headspan.scores import Scores
from headspan.scoring.run import score
from headspan.scoring.subspaces import orthonormal_bases
from headspan.scoring.tiles import TileStore
from headspan.sources.downloads import Downloads
from headspan.sources.revisions import Checkpoint, find_checkpoints

Progress = Callable[[int, int], None]
Arrays = dict[str, np.ndarray]
ALL_SCORES = 256 * 2**20  # bytes up to which all scores of all steps are kept while the run goes on
SOME_SCORES = 1000  # else so many of each step and pairing, or k if that is more


def track(
    refs: Any,
    out: str | os.PathLike[str] | None = None,
    *,
    steps: Sequence[int] | None = None,
    last: int | None = None,
    fold: bool = False,
    k: int = 20,
    run: bool = False,
    keep: bool = False,
    allow_duplicates: bool = False,
    memory: str | int | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Series:
    """Follow edges, heads and hubs through the checkpoints of a training run.

    refs: references in order, or patterns like ``"org/name@step*"`` (revisions of the hub) and ``"run/step*"``.
    out: write the series there, and keep finished steps beside it until it is complete.
    steps, last: only these step numbers; only so many checkpoints from the end.
    fold: fold the norms into the weights first.
    k: edges that are among the strongest k of their pairing at some step are kept.
    run: also run every checkpoint and keep its head scores.
    keep: leave the files of the hub in its cache; else what this run downloaded for a step is removed after it.
    allow_duplicates: take checkpoints with equal attention weights for what they say they are.
    """
    if k < 1:
        raise HeadspanError(f"cannot keep {k} edges: give a number of 1 or more")
    checkpoints = find_checkpoints(refs, steps=steps, last=last)
    if run and not all(isinstance(c.ref, (str, os.PathLike)) for c in checkpoints):
        raise HeadspanError("head scores of a series need references that can be opened again: paths or hub ids")
    with ExitStack() as stack:
        home = out
        if home is None:
            folder = tempfile.mkdtemp(prefix="headspan-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            home = Path(folder) / "series"
        store = stack.enter_context(TileStore(home, _key(checkpoints, fold, k, run)))
        tracker = _Tracker(checkpoints, store, fold, k, run, keep, allow_duplicates, memory, say)
        series = tracker.series(progress)
        if out is not None:
            series.save(out)
    return series


def _key(checkpoints: Sequence[Checkpoint], fold: bool, k: int, run: bool) -> str:
    """The same for the same checkpoints, unchanged, and the same options."""
    parts = [[c.name, c.step, c.commit or _stamp(c.ref)] for c in checkpoints]
    text = json.dumps([headspan.__version__, parts, fold, k, run])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _stamp(ref: Any) -> Any:
    """Names, sizes and times of local files; they tell when a checkpoint was replaced between two runs."""
    if not isinstance(ref, (str, os.PathLike)):
        return id(ref)  # an object in memory: no other run can go on with it
    path = Path(os.path.expanduser(ref))
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    stats = ((file.name, file.stat()) for file in files if file.is_file())
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


class _Tracker:
    """One run over a series."""

    def __init__(
        self, checkpoints: list[Checkpoint], store: TileStore, fold: bool, k: int, run: bool, keep: bool,
        allow_duplicates: bool, memory: str | int | None, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.checkpoints, self.store = checkpoints, store
        self.fold, self.k, self.run, self.keep = fold, k, run, keep
        self.allow_duplicates, self.memory, self.say = allow_duplicates, memory, say
        self.final = len(checkpoints) - 1
        self.seen: dict[str, str] = {}  # content -> name
        self.notes: list[str] = []
        self.shape: dict[str, Any] = {}  # of the last checkpoint: what all others must have
        self.chosen: dict[Pairing, np.ndarray] = {}  # flat indices of the strongest edges at the last step

    def series(self, progress: Progress) -> Series:
        done: dict[int, tuple[dict[str, Any], Arrays]] = {}
        order = [self.final, *range(self.final)]
        for count, place in enumerate(order):
            kept = self._kept(place)
            if kept is None:
                kept = self._measured(place, count)
            elif not done and self._kept(order[1]) is not None:
                finished = sum(self._kept(i) is not None for i in order)
                self.say(f"going on with an unfinished series: {finished} of {len(order)} steps are done")
            self._learn(place, *kept)
            done[place] = kept
            if 0 < place < self.final:
                shutil.rmtree(self._bases(place - 1), ignore_errors=True)
            progress(count + 1, len(order))
        previous = dict(self._compare(self._bases(self.final - 1), self._bases(self.final)))
        done[self.final][1].update({f"from_previous/{role}": values for role, values in previous.items()})
        return self._assembled([done[place] for place in range(len(order))])

    # -- one step --------------------------------------------------------------------------------------------

    def _kept(self, place: int) -> tuple[dict[str, Any], Arrays] | None:
        """What an earlier run found at a step, if it is whole."""
        arrays = self.store.load(f"step-{place}")
        if arrays is None or "info" not in arrays or not self._needed_bases(place):
            return None
        return json.loads(arrays.pop("info").tobytes()), arrays

    def _needed_bases(self, place: int) -> bool:
        """Whether the bases that later steps are compared with are still there."""
        later = place in (self.final, self.final - 1) or self.store.load(f"step-{place + 1}") is None
        return not later or (self._bases(place) / "whole").exists()

    def _bases(self, place: int) -> Path:
        return self.store.folder / f"bases-{place}"

    def _learn(self, place: int, info: dict[str, Any], arrays: Arrays) -> None:
        """Take over what the following steps need to know of one."""
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
        sentence = f"{other} and {name} have equal attention weights: they look like one checkpoint under two names"
        if not self.allow_duplicates:
            raise HeadspanError(f"{sentence}; leave one out, or say --allow-duplicates if that is right")
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _measured(self, place: int, done: int) -> tuple[dict[str, Any], Arrays]:
        checkpoint = self.checkpoints[place]
        try:
            with self._downloads(place), self._opened(checkpoint) as weights:
                info, arrays = self._measure(place, weights)
                if self.run:
                    arrays |= self._head_scores(checkpoint, weights)
        except HeadspanError as error:
            where = "" if checkpoint.name in str(error) else f"{checkpoint.name}: "
            kept = f" ({done} of {len(self.checkpoints)} steps are kept, the same command goes on after them)"
            raise HeadspanError(f"{where}{error}{kept if done else ''}") from error
        text = np.frombuffer(json.dumps(info).encode(), dtype=np.uint8)
        self.store.save(f"step-{place}", {**arrays, "info": text})
        return info, arrays

    def _downloads(self, place: int) -> Any:
        checkpoint = self.checkpoints[place]
        if self.keep or checkpoint.hub is None or checkpoint.commit is None:
            return nullcontext()
        return Downloads(checkpoint.hub, checkpoint.commit, self.store.folder / f"downloads-{place}.json")

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
        scores = score(weights, "pk", "flow", memory=self.memory)
        weights.check_unchanged()
        for pairing in FLOW_PAIRINGS:
            arrays |= self._edges(scores, pairing)
        info = {"content": content, "shape": shape, "notes": weights.notes, "fingerprint": weights.fingerprint()}
        info |= {"folding": weights.folding, "architecture": weights.architecture}
        return info, arrays

    def _check_shape(self, shape: dict[str, Any], weights: AttentionWeights) -> None:
        for what, seen in shape.items():
            if self.shape and seen != self.shape[what]:
                described = "other heads" if isinstance(seen, dict) else f"{what} {seen}, not {self.shape[what]}"
                raise HeadspanError(
                    f"{weights.reference} has {described} as in {self.checkpoints[-1].name}: a series is one model"
                )

    def _drifts(self, place: int, weights: AttentionWeights) -> tuple[Arrays, str]:
        """Drift from the step before and from the last, and the hash of the weights; bases are left on disk."""
        digest = hashlib.sha256()
        folder = self._bases(place)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for layer in weights.layers:
            for role in ROLES:
                read = weights.read(role, layer)
                digest.update(np.ascontiguousarray(read).view(np.uint8).data)
                bases, _ = orthonormal_bases(read, weights.storage_dtype(role, layer))
                np.save(folder / f"{role}{layer}.npy", bases.astype(np.float32), allow_pickle=False)
        (folder / "whole").touch()
        arrays: Arrays = {}
        for name, other in (("from_previous", place - 1), ("from_last", self.final)):
            if other < 0 or (name == "from_previous" and place == self.final):
                continue  # the step before the last one is not known yet
            found = self._compare(self._bases(other), folder, weights.layers)
            arrays |= {f"{name}/{role}": values for role, values in found}
        return arrays, digest.hexdigest()

    def _compare(
        self, first: Path, second: Path, layers: Sequence[int] | None = None
    ) -> Iterator[tuple[Role, np.ndarray]]:
        """Drift of every head between the bases of two steps, role by role."""
        for role in ROLES:
            parts = []
            for layer in layers if layers is not None else self.shape["layers"]:
                a, b = (
                    np.load(f / f"{role}{layer}.npy", allow_pickle=False).astype(np.float64) for f in (first, second)
                )
                ranks = [np.any(bases, axis=1).sum(axis=1) for bases in (a, b)]
                parts.append(span_drift(a, ranks[0], b, ranks[1])[0])
            yield role, np.concatenate(parts).astype(np.float32)

    def _edges(self, scores: Scores, pairing: Pairing) -> Arrays:
        """The strongest edges of one pairing (all of them if that is little), the last step's, and the hubs."""
        matrix = scores["pk", pairing].forward()
        flat = matrix.values.ravel()
        present = np.flatnonzero(~np.isnan(flat))
        order = present[np.argsort(-flat[present], kind="stable")]
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
        from headspan.analysis.behaviour import head_scores

        found = head_scores(checkpoint.ref)
        if tuple(found.heads) != tuple(weights.heads(Role.Q)):
            raise HeadspanError(f"{checkpoint.name} runs with other heads than its weights have")
        return {f"head/{kind}": values.astype(np.float32) for kind, values in found.arrays.items()}

    # -- the whole -------------------------------------------------------------------------------------------

    def _assembled(self, parts: list[tuple[dict[str, Any], Arrays]]) -> Series:
        heads = {role: tuple(map(Head.parse, self.shape["heads"][str(role)])) for role in ROLES}
        edges: list[SeriesEdge] = []
        scores, ranks = [], []
        for pairing in FLOW_PAIRINGS:
            strongest = [arrays[f"index/{pairing}"][: self.k] for _, arrays in parts]
            union = np.unique(np.concatenate(strongest))
            rows, columns = np.divmod(union, len(heads[pairing.target]))
            edges += [
                SeriesEdge(pairing, heads[pairing.source][i], heads[pairing.target][j])
                for i, j in zip(rows, columns, strict=True)
            ]
            found = [self._at(arrays, pairing, union) for _, arrays in parts]
            scores.append(np.stack([value for value, _ in found]))
            ranks.append(np.stack([rank for _, rank in found]))
        infos = [info for info, _ in parts]
        steps = tuple(
            Step(checkpoint.step, checkpoint.name, info["content"])
            for checkpoint, info in zip(self.checkpoints, infos, strict=True)
        )
        provenance = {"architecture": infos[-1]["architecture"], "fingerprints": [i["fingerprint"] for i in infos]}
        return Series(
            steps, self.k, infos[-1]["folding"], heads, tuple(edges), np.concatenate(scores, axis=1),
            np.concatenate(ranks, axis=1), self._by_role(parts, "from_previous", heads),
            self._by_role(parts, "from_last", heads), self._stacked(parts), self._stacked_head_scores(parts),
            self.notes, provenance,
        )  # fmt: skip

    def _at(self, arrays: Arrays, pairing: Pairing, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and ranks of some edges at one step; NaN and 0 for those that were not kept there."""
        index, values = arrays[f"index/{pairing}"], arrays[f"score/{pairing}"]
        place = {int(flat): i for i, flat in enumerate(index)}
        positions = np.array([place.get(int(flat), -1) for flat in wanted], dtype=np.int64)
        scores = np.where(positions >= 0, values[positions] if values.size else np.nan, np.float32(np.nan))
        extra = arrays.get(f"chosen/{pairing}")
        if extra is not None:
            kept = {int(flat): value for flat, value in zip(self.chosen[pairing], extra, strict=True)}
            scores = np.array([kept.get(int(f), s) for f, s in zip(wanted, scores, strict=True)], dtype=np.float32)
        return scores.astype(np.float32), (positions + 1).astype(np.int32)

    @staticmethod
    def _by_role(
        parts: list[tuple[dict[str, Any], Arrays]], name: str, heads: dict[Role, Any]
    ) -> dict[Role, np.ndarray]:
        empty = {role: np.full(len(heads[role]), np.nan, dtype=np.float32) for role in ROLES}
        return {role: np.stack([arrays.get(f"{name}/{role}", empty[role]) for _, arrays in parts]) for role in ROLES}

    @staticmethod
    def _stacked(parts: list[tuple[dict[str, Any], Arrays]]) -> dict[tuple[str, Pairing], np.ndarray]:
        names = [(hub, p) for hub in ("inlet", "outlet") for p in FLOW_PAIRINGS if f"{hub}/{p}" in parts[0][1]]
        return {(hub, p): np.stack([arrays[f"{hub}/{p}"] for _, arrays in parts]) for hub, p in names}

    @staticmethod
    def _stacked_head_scores(parts: list[tuple[dict[str, Any], Arrays]]) -> dict[str, np.ndarray]:
        kinds = [name.partition("/")[2] for name in parts[0][1] if name.startswith("head/")]
        return {kind: np.stack([arrays[f"head/{kind}"] for _, arrays in parts]) for kind in kinds}


def _shape(weights: AttentionWeights) -> dict[str, Any]:
    """What all checkpoints of one run have in common, as JSON would give it back."""
    return {
        "d_model": weights.d_model,
        "layers": list(weights.layers),
        "heads": {str(role): [str(head) for head in weights.heads(role)] for role in ROLES},
    }
