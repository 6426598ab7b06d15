"""Fuzzer: whatever is given, there is a right answer or one sentence.

    python tests/fuzz/fuzz.py --cases 20000 [--seed N] [--only commands] [--case I]

Each case is of one kind: ``files`` (changed files read in Python), ``commands`` (every command, with odd options, files
and outputs), ``calls`` (odd arguments of public functions), ``oracle`` (random models against float64 definitions),
``stores`` (stopped runs whose tiles were tampered with), ``inputs`` (changed files of vectors, autoencoders, adapters,
circuits and labels), ``edited`` (results and series that were edited after they were written), ``kills`` (commands
killed at a random moment), ``races`` (inputs that change during a command),
``dask`` and ``hub`` (rare: they start processes; ``hub`` is a server that misbehaves). A finding is

- any exception that is not a `HeadspanError` of one line, or a warning from numpy,
- more than the kind's processor time, or more memory than its limit above what the imports took,
- a wrong answer: what that is, each kind says in its module.

Cases run in one worker process that is started again when it dies. ``--case I`` runs one case with a traceback.
``--log FILE`` writes every outcome to a file; the same command continues after its last case.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from calls import Calls
from commands import Commands, OnDask
from disturbed import Edits, Kills
from edited import Edited
from files import Files
from hostile_hub import HostileHub
from inputs import Inputs
from oracle import Oracle
from stores import Stores

from headspan.vocabulary.errors import HeadspanWarning

WALL_SECONDS = 300  # for a worker that waits without using the processor
KINDS: dict[str, tuple[Any, float]] = {
    "files": (Files, 40), "commands": (Commands, 30), "calls": (Calls, 12), "oracle": (Oracle, 14),
    "stores": (Stores, 4), "inputs": (Inputs, 16), "edited": (Edited, 8), "kills": (Kills, 1), "races": (Edits, 1),
    "dask": (OnDask, 0.01), "hub": (HostileHub, 0.01),
}  # fmt: skip


class Hang(BaseException):
    """Raised by the timer; no ``except Exception`` swallows it."""


class Bench:
    """The kinds of cases, each set up when its first case comes."""

    def __init__(self, folder: Path, seed: int, only: str | None = None) -> None:
        self.folder, self.seed, self.only = folder, seed, only
        self._made: dict[str, Any] = {}

    def kind(self, name: str) -> Any:
        if name not in self._made:
            (self.folder / name).mkdir()
            self._made[name] = KINDS[name][0](self.folder / name)
        return self._made[name]

    def case(self, number: int) -> tuple[str, Any]:
        """The case of a number: the same for the same seed."""
        chance = random.Random(f"{self.seed}/{number}")
        name = chance.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
        name = self.only or name
        return name, self.kind(name).case(chance)


def _hang(*_: object) -> None:
    raise Hang("more processor time than a case may take")


def run_case(exercise: Any, case: Any) -> dict[str, Any]:
    """The outcome of one case: answered, refused, or a finding with its kind and place."""
    signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, exercise.cpu_seconds)
    try:
        refusals = exercise.run(case)
        return {"outcome": "refused" if refusals else "answered", "text": refusals[0][:200] if refusals else ""}
    except (Exception, Hang) as error:
        places = traceback.extract_tb(error.__traceback__)
        place = next((p for p in reversed(places) if f"{os.sep}headspan{os.sep}" in p.filename), places[-1])
        text = f"{type(error).__name__}: {error}"[:400] + f" at {Path(place.filename).name}:{place.lineno}"
        return {"outcome": "finding", "text": text}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def prepare() -> None:
    """Imports that cases would make one by one, so that they do not count as theirs."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.figure  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    warnings.simplefilter("ignore", HeadspanWarning)  # a changed result is reported as one, which is right


def work(seed: int, start: int, stop: int, only: str | None) -> None:
    """Worker: run cases and print one JSON line for each."""
    answers = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory(prefix="headspan-fuzz-", dir=_fast_folder()) as name:
        prepare()
        bench = Bench(Path(name), seed, only)
        for number in range(start, stop):
            kind, case = bench.case(number)
            limit = _virtual_memory() + bench.kind(kind).memory
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            outcome = run_case(bench.kind(kind), case)
            shown = shorten(case) if outcome["outcome"] == "finding" else ""
            print(json.dumps({"case": number, "kind": kind, "what": shown, **outcome}), file=answers, flush=True)


def shorten(case: Any) -> str:
    """A case for a reader of findings: its words, or what was changed."""
    damaged = getattr(case, "damaged", None)
    if damaged is not None:
        return f"{case.words} with {damaged.kind} of {damaged.target}"[:600]
    return repr(case)[:600]


def _fast_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _virtual_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def outcomes(seed: int, start: int, stop: int, only: str | None = None) -> Generator[dict[str, Any]]:
    """All cases from start to stop, by workers that are replaced when they die or wait for ever."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    while start < stop:
        command = [sys.executable, __file__, "--worker", str(seed), str(start), str(stop)]
        command += ["--only", only] if only else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment) as worker:
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
            yield {"case": start, "kind": "?", "what": "", "outcome": "finding", "text": why}
            start += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), help="cases of this kind alone")
    parser.add_argument("--case", type=int, help="run this one case and show its traceback")
    parser.add_argument("--log", type=Path, help="keep outcomes in this file, and continue where it ends")
    parser.add_argument("--worker", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker, options.only)
        return 0
    if options.case is not None:
        with tempfile.TemporaryDirectory() as name:
            os.environ["HEADSPAN_DEBUG"] = "1"
            prepare()
            bench = Bench(Path(name), options.seed, options.only)
            kind, case = bench.case(options.case)
            print(kind, repr(case)[:3000])
            print(bench.kind(kind).run(case))
        return 0
    stop = options.start + options.cases
    if options.log is None:
        return report(outcomes(options.seed, options.start, stop, options.only), options.seed)
    return report(logged(options.log, options.seed, options.start, stop, options.only), options.seed)


def logged(log: Path, seed: int, start: int, stop: int, only: str | None) -> Generator[dict[str, Any]]:
    """The outcomes that a log holds, then those that it lacks, which are added to it."""
    kept = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    yield from kept
    with open(log, "a") as file:
        for outcome in outcomes(seed, max([start, *(one["case"] + 1 for one in kept)]), stop, only):
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            yield outcome


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
                print(
                    f"case {outcome['case']} ({outcome['kind']}): {outcome['text']}\n    {outcome['what']}", flush=True
                )
    for kind, counter in sorted(by_kind.items()):
        print(f"{kind:18} {counter.total():6} cases: {dict(counter)}")
    total = sum(by_kind.values(), collections.Counter())
    seconds = time.monotonic() - began
    print(f"{total.total()} cases in {seconds:.0f} s, seed {seed}: {dict(total)}, {len(places)} places with findings")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
