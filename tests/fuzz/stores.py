"""Runs that were stopped, whose kept tiles were then tampered with: the result is that of one undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from commands import environment
from place import Finding
from safetensors.numpy import load_file, save_file

import headspan as hs
from headspan.scoring import run as scoring
from headspan.scoring import tiles

sys.path.insert(0, str(Path(__file__).parents[1]))
from notices import noticed

PLANS = [(("pk", "cs"), "all"), (("procrustes",), "all"), (("pk", "procrustes"), "OK"), (("cs", "linear_cka"), "KK")]


class Tampering(NamedTuple):
    plan: int
    block: int
    stop: float  # share of the tiles after which the run is stopped
    changes: tuple[str, ...]
    seed: int


class Stores:
    cpu_seconds, memory = 60.0, 2 << 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stores"
        self.model, self.cache, self.out = self.folder / "model", self.folder / "cache", self.folder / "r.safetensors"
        self.model.mkdir(parents=True)
        rng, d, layers = np.random.default_rng(5), 16, 6
        shapes = {"c_attn": (d, 3 * d), "c_proj": (d, d)}
        save_file(
            {
                f"h.{i}.attn.{name}.weight": rng.normal(size=shape).astype(np.float32)
                for i in range(layers)
                for name, shape in shapes.items()
            },
            self.model / "model.safetensors",
        )
        config = {"model_type": "gpt2", "n_layer": layers, "n_head": 4, "n_embd": d, "vocab_size": 10}
        (self.model / "config.json").write_text(json.dumps(config))
        self.whole: dict[tuple[int, int], hs.Scores] = {}

    def case(self, chance: random.Random) -> Tampering:
        changes = tuple(chance.choices(list(TAMPER), k=chance.choice([0, 1, 1, 2, 4])))
        return Tampering(
            chance.randrange(len(PLANS)), chance.choice([1, 2, 3]), chance.random(), changes, chance.randrange(2**31)
        )

    def run(self, case: Tampering) -> list[str]:
        metrics, pairings = PLANS[case.plan]
        options: dict[str, Any] = {"metric": metrics, "pairing": pairings}
        said: list[str] = []
        blocks = mock.patch(
            "headspan.scoring.plan._cut", lambda w, *rest: (even_blocks(w.places, case.block), "blocks")
        )
        try:
            with blocks, environment(self.folder, HEADSPAN_CACHE_DIR=str(self.cache)):
                if (case.plan, case.block) not in self.whole:
                    self.whole[case.plan, case.block] = hs.score(self.model, **options)
                self._stopped(case, options)
                kept = sorted(self.cache.rglob("*.safetensors"))
                chance = random.Random(case.seed)
                for name in case.changes if kept else ():
                    TAMPER[name](kept, chance)
                with noticed() as said:
                    found = hs.score(self.model, **options, out=self.out)
                self._compare(found, self.whole[case.plan, case.block], case)
                self._compare(hs.load(self.out), self.whole[case.plan, case.block], case)
        finally:
            if self.cache.exists():
                shutil.rmtree(self.cache)
            self.out.unlink(missing_ok=True)
        left = sorted(path.name for path in self.folder.iterdir())
        if left != ["model"]:
            raise Finding(f"left behind: {left}")
        return [sentence for sentence in said if "computed again" in sentence]

    def _stopped(self, case: Tampering, options: dict[str, Any]) -> None:
        """Run until a share of the tiles is done."""
        real, done = scoring.compute_tile, 0
        total = 21 if case.block == 1 else 6

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > case.stop * total:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        with mock.patch.object(scoring, "compute_tile", compute):
            try:
                hs.score(self.model, **options, out=self.out)
            except KeyboardInterrupt:
                return

    def _compare(self, found: hs.Scores, whole: hs.Scores, case: Tampering) -> None:
        if found.arrays.keys() != whole.arrays.keys():
            raise Finding("other matrices")
        for key in whole.arrays:
            if not np.array_equal(found[key].values, whole[key].values, equal_nan=True):
                raise Finding(f"{key} differs from an undisturbed run after {case.changes}")


def even_blocks(places: Any, size: int) -> Any:
    from headspan.scoring.plan import _even_blocks

    return _even_blocks(places, size)


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[list[Path], random.Random], None]:
    def tamper(kept: list[Path], chance: random.Random) -> None:
        path = chance.choice(kept)
        if path.is_file() and not path.is_symlink():
            path.write_bytes(change(path.read_bytes(), chance))

    return tamper


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _swap(kept: list[Path], chance: random.Random) -> None:
    first, second = chance.choice(kept), chance.choice(kept)
    if first.is_file() and second.is_file():
        one, two = first.read_bytes(), second.read_bytes()
        first.write_bytes(two)
        second.write_bytes(one)


def _forge(number: float) -> Callable[[list[Path], random.Random], None]:
    """A tile with impossible numbers and a hash that fits them."""

    def tamper(kept: list[Path], chance: random.Random) -> None:
        path = chance.choice(kept)
        if not path.is_file():
            return  # a pipe or a device by now, whose reading never ends
        try:
            raw = path.read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            about = json.loads(header["__metadata__"]["tile"])
            arrays = load_file(path)
        except Exception:
            return  # tampered with already
        name = chance.choice([name for name, array in arrays.items() if array.dtype.kind == "f"])
        arrays[name] = np.where(np.isnan(arrays[name]), np.nan, number).astype(arrays[name].dtype)
        path.write_bytes(tiles._sealed(arrays, about["plan"], about["tile"]))

    return tamper


def _replace(make: Callable[[Path], Any]) -> Callable[[list[Path], random.Random], None]:
    def tamper(kept: list[Path], chance: random.Random) -> None:
        path = chance.choice(kept)
        if path.is_file():
            path.unlink()
            make(path)

    return tamper


TAMPER: dict[str, Callable[[list[Path], random.Random], None]] = {
    "flip": _bytes(_flip),
    "truncate": _bytes(lambda content, chance: content[: chance.randrange(len(content) + 1)]),
    "append": _bytes(lambda content, chance: content + b"\0" * chance.choice([1, 4096])),
    "zeros": _bytes(lambda content, chance: bytes(len(content))),
    "noise": _bytes(lambda content, chance: chance.randbytes(len(content))),
    "swap": _swap,
    "NaN": _forge(float("nan")),
    "infinity": _forge(float("inf")),
    "negative": _forge(-1.0),
    "too large": _forge(1e9),
    "pipe": _replace(os.mkfifo),
    "folder": _replace(Path.mkdir),
    "link": _replace(lambda path: path.symlink_to("/dev/zero")),
    "removed": _replace(lambda path: None),
}
