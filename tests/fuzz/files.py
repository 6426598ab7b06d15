"""Changed checkpoints, result files and label files must give an answer or one message, in Python.

A case is a valid set of files with one file changed (see ``mutations``). It is opened, described, read and folded,
with its vocabulary; one in four is also scored and its tokens are listed. Wrong answers are findings: tensors that were
not changed must read as before and may not be refused; where the safetensors package reads the changed file, its
numbers must be ours; PK must be that of bases made here by QR.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mutations import Case, make_case
from place import Finding, check_sentence
from seeds import D, write_seeds

import headspan as hs
from headspan.vocabulary.heads import ROLES

SCORED = 4  # of so many models that can be read, one is also scored
ATTENTION = {
    "gpt2": {"Q": "h.{}.attn.c_attn", "K": "h.{}.attn.c_attn", "V": "h.{}.attn.c_attn", "O": "h.{}.attn.c_proj"},
    "llama": {r: "model.layers.{}.self_attn." + f"{r.lower()}_proj" for r in "QKVO"},
    "llama.gguf": {"Q": "blk.{}.attn_q", "K": "blk.{}.attn_k", "V": "blk.{}.attn_v", "O": "blk.{}.attn_output"},
}
Reading = dict[tuple[str, int], np.ndarray]


class Files:
    """Runs all that headspan does on one set of files, and compares with the unchanged ones."""

    cpu_seconds, memory = 10.0, 768 << 20

    def __init__(self, folder: Path) -> None:
        self.seed, self.work = folder / "seed", folder / "work"
        write_seeds(self.seed)
        shutil.copytree(self.seed, self.work)
        self.originals = {name: dict(_readings(hs.open(self.seed / name))) for name in ATTENTION}

    def case(self, chance: random.Random) -> Case:
        return make_case(self.seed, chance)

    def run(self, case: Case) -> list[str]:
        """The sentences with which steps of this case were refused; anything else that happens is raised."""
        path = self.work / case.target
        path.write_bytes(case.content)
        self.refusals: list[str] = []
        try:
            if case.target == "labels.csv":
                self._try(lambda: self._labels(path))
            elif case.target == "result.safetensors":
                self._try(lambda: self._result(path))
            else:
                self._try(lambda: self._model(case.target.partition("/")[0], case))
        finally:
            shutil.copyfile(self.seed / case.target, path)
        return [check_sentence(sentence) for sentence in self.refusals]

    def _try(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except hs.HeadspanError as error:
            self.refusals.append(str(error))
            return None

    def _labels(self, path: Path) -> None:
        from headspan.results.labels import Labels

        labels = Labels.load(path)
        if not labels.names or not all(labels.heads(name) for name in labels.names):
            raise Finding("a class without heads")
        self._try(lambda: labels.for_model(hs.load(self.seed / "result.safetensors").ports))

    def _result(self, path: Path) -> None:
        from headspan.graphs.selection import wiring
        from headspan.statistics.baseline import summarise
        from headspan.statistics.hubs import hubs

        scores = hs.load(path)
        for metric, pairing in scores.arrays:
            matrix = scores[metric, pairing]
            self._try(lambda m=matrix: (m.top(3), m.forward().pairs(), m._repr_html_()))
            self._try(lambda m=metric, p=pairing: hubs(scores, p, m))
        for step in (lambda: wiring(scores, "OK"), lambda: summarise(scores), scores._repr_html_):
            self._try(step)
        self._try(lambda: scores.save(path.with_name("again.safetensors")))

    def _model(self, name: str, case: Case) -> None:
        from headspan.reading.info import describe

        with hs.open(self.work / name) as weights:
            self._try(lambda: describe(weights))
            readings = dict(_readings(weights, self._try))
            self._compare(name, case, readings)
            if case.touched is None and name != "llama.gguf" and weights.architecture == name:
                self._try(lambda: self._compare_with_package(name, weights, readings))
            for layer in weights.layers[:4]:
                for step in (weights.norm, *(lambda n, r=r: weights.bias(r, n) for r in ROLES)):
                    self._try(lambda s=step, n=layer: s(n))
            self._try(weights.final_norm)
            self._try(lambda: weights.unembedding_rows(0, min(8, weights.vocab_size or 0)))
            self._try(weights.unembedding_bias)
            self._try(lambda: self._vocabulary(weights))
            if zlib.crc32(case.content) % SCORED == 0:  # the numbers were read by now: what follows is slow
                self._try(lambda: self._score(weights, readings))
                self._try(lambda: self._tokens(weights))
            self._try(lambda: [hs.fold(weights).read(role, weights.layers[0]) for role in ROLES])

    def _vocabulary(self, weights: Any) -> None:
        vocabulary = weights.vocabulary()
        if vocabulary is not None:
            for token in range(min(vocabulary.size, 20)):
                vocabulary.readable(token).encode("utf-8")
            with suppress(hs.HeadspanError):  # the list of tokens in a GGUF file need not be able to encode
                vocabulary.encode("ab a")

    def _tokens(self, weights: Any) -> None:
        for found in hs.tokens(weights, weights.heads("O")[0], "O", 3):
            if not np.isfinite(found.score):
                raise Finding(f"token score {found.score}")

    def _score(self, weights: Any, readings: Reading) -> None:
        scores = hs.score(weights, "pk", "OK", memory="300MB")
        rows, columns, values = scores["pk", "OK"].pairs()
        if not np.isfinite(values).all():
            raise Finding("a score that is not finite")
        for row, column, value in list(zip(rows, columns, values, strict=True))[:2]:
            source, target = scores.heads("O")[row], scores.heads("K")[column]
            a, b = readings["O", source.layer][source.index], readings["K", target.layer][target.index]
            if max(map(_condition, (a, b))) > 1e3:
                continue
            expected = np.square(np.linalg.qr(a.astype(float))[0].T @ np.linalg.qr(b.astype(float))[0]).sum()
            if abs(expected - value) > 1e-4:
                raise Finding(f"PK of {source} and {target} is {value}, not {expected}")

    def _compare(self, name: str, case: Case, readings: Reading) -> None:
        """Where only some tensors were changed, all others read as before."""
        if case.touched is None:
            return
        for (role, layer), before in self.originals[name].items():
            if ATTENTION[name][role].format(layer) + ".weight" in case.touched:
                continue
            if not np.array_equal(readings.get((role, layer), np.empty(0)), before):
                raise Finding(f"{role} of layer {layer} is refused or differs, though its tensor was not changed")

    def _compare_with_package(self, name: str, weights: Any, readings: Reading) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        tensors: dict[str, np.ndarray] = {}
        try:
            for path in sorted((self.work / name).glob("*.safetensors")):
                tensors |= load_file(path)
        except (SafetensorError, KeyError, TypeError, AttributeError):
            return  # broken where nobody reads it, or a number type numpy has not
        d = weights.d_model
        for (role, layer), ours in readings.items():
            stored = tensors[ATTENTION[name][role].format(layer) + ".weight"]
            if name == "gpt2" and role != "O":
                start = "QKV".index(role) * d
                stored = stored[:, start : start + d]
            elif name == "gpt2" or role != "O":
                stored = stored.T
            flat = ours.transpose(1, 0, 2).reshape(d, -1)
            if not np.array_equal(flat, stored.astype(flat.dtype)):
                raise Finding(f"{role} of layer {layer} differs from what the safetensors package reads")


def _readings(weights: Any, attempt: Callable[[Callable[[], Any]], Any] = lambda step: step()) -> Iterator[Any]:
    for layer in weights.layers[:64]:
        for role in ROLES:
            found = attempt(lambda r=role, n=layer: weights.read(r, n))
            if found is not None:
                yield (str(role), layer), found


def _condition(weight: np.ndarray) -> float:
    values = np.linalg.svd(weight.astype(float), compute_uv=False)
    return float("inf") if len(values) == 0 or values[-1] == 0 or weight.shape[1] > D else float(values[0] / values[-1])
