"""Mutation fuzzer: changed checkpoints, result files and label files must give an answer or one sentence.

    python tests/fuzz/fuzz.py --cases 20000 [--seed N] [--case I]

A case is a valid set of files with one file changed (see ``mutations``). It is opened, described, read and folded,
with its vocabulary; one in four is also scored and its tokens are listed. What may come out is a `HeadspanError` of one
line or an answer; a finding is

- any other exception or warning, or a message of several lines,
- more than ``CPU_SECONDS`` of processor time, or more memory than ``MEMORY`` above what the imports took,
- a wrong answer: tensors that were not changed must read as before and may not be refused; where the safetensors
  package reads the changed file, its numbers must be ours; PK must be that of bases made here by QR.

Cases run in one worker process that is started again when it dies. ``--case I`` runs one case with a traceback.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from mutations import Case, make_case
from seeds import D, write_seeds

import headspan as hs
from headspan.heads import ROLES

CPU_SECONDS = 10
WALL_SECONDS = 300  # for a worker that waits without using the processor
MEMORY = 768 << 20
SCORED = 4  # of so many models that can be read, one is also scored
ATTENTION = {
    "gpt2": {"Q": "h.{}.attn.c_attn", "K": "h.{}.attn.c_attn", "V": "h.{}.attn.c_attn", "O": "h.{}.attn.c_proj"},
    "llama": {r: "model.layers.{}.self_attn." + f"{r.lower()}_proj" for r in "QKVO"},
    "llama.gguf": {"Q": "blk.{}.attn_q", "K": "blk.{}.attn_k", "V": "blk.{}.attn_v", "O": "blk.{}.attn_output"},
}
Reading = dict[tuple[str, int], np.ndarray]


class Hang(BaseException):
    """Raised by the timer; no ``except Exception`` swallows it."""


class WrongAnswer(Exception):
    """An answer that is not the right one."""


class Exerciser:
    """Runs all that headspan does on one set of files, and compares with the unchanged ones."""

    def __init__(self, folder: Path) -> None:
        self.seed, self.work = folder / "seed", folder / "work"
        write_seeds(self.seed)
        shutil.copytree(self.seed, self.work)
        self.originals = {name: dict(_readings(hs.open(self.seed / name))) for name in ATTENTION}

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
        for sentence in self.refusals:
            if "\n" in sentence or not sentence or len(sentence) > 3000:
                raise WrongAnswer(f"not one line: {sentence[:200]!r}")
        return self.refusals

    def _try(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except hs.HeadspanError as error:
            self.refusals.append(str(error))
            return None

    def _labels(self, path: Path) -> None:
        from headspan.analysis.labels import Labels

        labels = Labels.load(path)
        if not labels.names or not all(labels.heads(name) for name in labels.names):
            raise WrongAnswer("a class without heads")
        self._try(lambda: labels.for_model(hs.load(self.seed / "result.safetensors").ports))

    def _result(self, path: Path) -> None:
        from headspan.analysis.baseline import summarise
        from headspan.analysis.hubs import hubs
        from headspan.analysis.wiring import wiring

        scores = hs.load(path)
        for metric, pairing in scores.arrays:
            matrix = scores[metric, pairing]
            self._try(lambda m=matrix: (m.top(3), m.forward().pairs(), m._repr_html_()))
            self._try(lambda m=metric, p=pairing: hubs(scores, p, m))
        for step in (lambda: wiring(scores, "OK"), lambda: summarise(scores), scores._repr_html_):
            self._try(step)
        self._try(lambda: scores.save(path.with_name("again.safetensors")))

    def _model(self, name: str, case: Case) -> None:
        from headspan.cli.info import describe

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
            if (
                zlib.crc32(case.content) % SCORED == 0
            ):  # the numbers were read by now: what follows is slow and the same
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
        from headspan.analysis.tokens import head_tokens

        for found in head_tokens(weights, weights.heads("O")[0], "O", 3):
            if not np.isfinite(found.score):
                raise WrongAnswer(f"token score {found.score}")

    def _score(self, weights: Any, readings: Reading) -> None:
        scores = hs.score(weights, "pk", "OK", memory="300MB")
        rows, columns, values = scores["pk", "OK"].pairs()
        if not np.isfinite(values).all():
            raise WrongAnswer("a score that is not finite")
        for row, column, value in list(zip(rows, columns, values, strict=True))[:2]:
            source, target = scores.heads("O")[row], scores.heads("K")[column]
            a, b = readings["O", source.layer][source.index], readings["K", target.layer][target.index]
            if max(map(_condition, (a, b))) > 1e3:
                continue
            expected = np.square(np.linalg.qr(a.astype(float))[0].T @ np.linalg.qr(b.astype(float))[0]).sum()
            if abs(expected - value) > 1e-4:
                raise WrongAnswer(f"PK of {source} and {target} is {value}, not {expected}")

    def _compare(self, name: str, case: Case, readings: Reading) -> None:
        """Where only some tensors were changed, all others read as before."""
        if case.touched is None:
            return
        for (role, layer), before in self.originals[name].items():
            if ATTENTION[name][role].format(layer) + ".weight" in case.touched:
                continue
            if not np.array_equal(readings.get((role, layer), np.empty(0)), before):
                raise WrongAnswer(f"{role} of layer {layer} is refused or differs, though its tensor was not changed")

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
                raise WrongAnswer(f"{role} of layer {layer} differs from what the safetensors package reads")


def _readings(weights: Any, attempt: Callable[[Callable[[], Any]], Any] = lambda step: step()) -> Iterator[Any]:
    for layer in weights.layers[:64]:
        for role in ROLES:
            found = attempt(lambda r=role, n=layer: weights.read(r, n))
            if found is not None:
                yield (str(role), layer), found


def _condition(weight: np.ndarray) -> float:
    values = np.linalg.svd(weight.astype(float), compute_uv=False)
    return float("inf") if len(values) == 0 or values[-1] == 0 or weight.shape[1] > D else float(values[0] / values[-1])


def case_of(seed: int, number: int, folder: Path) -> Case:
    return make_case(folder / "seed", random.Random(f"{seed}/{number}"))


def _hang(*_: object) -> None:
    raise Hang(f"more than {CPU_SECONDS} s of processor time")


def run_case(exerciser: Exerciser, case: Case) -> dict[str, Any]:
    """The outcome of one case: answered, refused, or a finding with its kind and place."""
    signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        refusals = exerciser.run(case)
        return {"outcome": "refused" if refusals else "answered", "text": refusals[0][:200] if refusals else ""}
    except (Exception, Hang) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:300] + f" at {Path(place.filename).name}:{place.lineno}"
        return {"outcome": "finding", "text": text}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def work(seed: int, start: int, stop: int) -> None:
    """Worker: run cases and print one JSON line for each."""
    warnings.simplefilter("error", RuntimeWarning)
    with tempfile.TemporaryDirectory(prefix="headspan-fuzz-", dir=_fast_folder()) as name:
        exerciser = Exerciser(Path(name))
        limit = _virtual_memory() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in range(start, stop):
            case = case_of(seed, number, Path(name))
            print(json.dumps({"case": number, "kind": case.kind, **run_case(exerciser, case)}), flush=True)


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def outcomes(seed: int, start: int, stop: int) -> Generator[dict[str, Any]]:
    """All cases from start to stop, by workers that are replaced when they die or wait for ever."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    while start < stop:
        command = [sys.executable, __file__, "--worker", str(seed), str(start), str(stop)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
            assert worker.stdout is not None
            selector = selectors.DefaultSelector()
            selector.register(worker.stdout, selectors.EVENT_READ)
            why = "the worker waited for ever"
            try:
                while selector.select(WALL_SECONDS):
                    line = worker.stdout.readline()
                    if not line:
                        why = f"the worker died with code {worker.wait()}"
                        break
                    start += 1
                    yield json.loads(line)
            finally:
                worker.kill()
        if start < stop:
            yield {"case": start, "kind": "?", "outcome": "finding", "text": why}
            start += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one case and show its traceback")
    parser.add_argument("--worker", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return 0
    if options.case is not None:
        with tempfile.TemporaryDirectory() as name:
            exerciser = Exerciser(Path(name))
            case = case_of(options.seed, options.case, Path(name))
            print(case.kind, case.target, case.touched, case.content[:2000])
            warnings.simplefilter("error", RuntimeWarning)
            print(exerciser.run(case))
        return 0
    return report(outcomes(options.seed, options.start, options.start + options.cases), options.seed)


def report(found: Generator[dict[str, Any]], seed: int) -> int:
    """Print findings as they come, and counts at the end or when stopped (SIGINT, SIGTERM); 1 if there were any."""
    began, places = time.monotonic(), set()
    by_kind: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), closing(found):
        for outcome in found:
            by_kind[outcome["kind"]][outcome["outcome"]] += 1
            if outcome["outcome"] == "finding":
                places.add(outcome["text"].rpartition(" at ")[2])
                print(f"case {outcome['case']} ({outcome['kind']}): {outcome['text']}", flush=True)
    for kind, counter in sorted(by_kind.items()):
        print(f"{kind:18} {counter.total():6} cases: {dict(counter)}")
    total = sum(by_kind.values(), collections.Counter())
    seconds = time.monotonic() - began
    print(f"{total.total()} cases in {seconds:.0f} s, seed {seed}: {dict(total)}, {len(places)} places with findings")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
