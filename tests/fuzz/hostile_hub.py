"""Hostile hubs: each behaviour against one command in a process of its own, whose time, memory and disk are measured.

    python tests/fuzz/hostile_hub.py [--only TEXT]

runs every behaviour once and prints what each took. A finding is: more than the time, memory or disk that a case may
take, an exit code other than 0 and 2, a refusal of more than one line, a wrong score, a token sent to somebody else, a
file left behind that is half written or outside the caches, and a wrong score from an honest hub afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import hostile_server as bad  # noqa: E402
import numpy as np  # noqa: E402
from hostile_server import COMMIT, OTHER, REPO, TOKEN, Act, Hub, serving  # noqa: E402
from place import Finding  # noqa: E402

import headspan as hs  # noqa: E402
from range_hub import repository  # noqa: E402

SECONDS, MEMORY, DISK = 60.0, 900 << 20, 150 << 20  # wall clock on a busy machine; resident; the model has 18 MB
WINDOW = 1.0  # seconds that a server may be slow, instead of the usual 20

SCORE = ("score", REPO, "--out", "r.safetensors", "--metric", "pk", "--pairing", "flow", "--force")
COMMANDS = {
    "tokenizer": ("tokens", REPO, "L0H0", "--role", "O"), "tokenizer about": ("tokens", REPO, "L0H0", "--role", "O"),
    "refs": ("track", f"{REPO}@step*", "--out", "r.safetensors"), "whole": (*SCORE, "--download"),
}  # fmt: skip


class Behaviour(NamedTuple):
    """What is done at a place, and what may come of it.

    may_answer: a right result may come too. poison: only that an honest hub is right afterwards matters.
    """

    place: str
    name: str
    act: Callable[[Hub], Act]
    may_answer: bool = False
    poison: bool = False
    linked: bool = True

    def __str__(self) -> str:
        return f"{self.place}: {self.name}"

    __repr__ = __str__


class Measured(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float
    memory: int
    disk: int


def behaviours() -> list[Behaviour]:
    return [*_anywhere(), *_redirects(), *_listings(), *_abouts(), *_json(), *_ranges(), *_poison()]


def _anywhere() -> Iterator[Behaviour]:
    """Ways to answer that any question can meet."""
    everywhere = [
        bad.silent, bad.slow_headers, bad.slow_body, bad.endless_body, bad.gzip_bomb, bad.endless_headers, bad.not_http,
    ]  # fmt: skip
    more = [
        bad.slow_chunks, bad.endless_line, bad.endless_continue, bad.endless_chunks, bad.endless_trailers,
        bad.claims_much, bad.ends_early, bad.hangs_up,
    ]  # fmt: skip
    for place in ("listing", "config", "index", "tokenizer", "header", "range", "whole", "refs", "about"):
        for act in [*everywhere, *(more if place in ("listing", "config", "range", "whole") else ())]:
            # Of an answer without a body the rest is not read.
            harmless = place == "about" and act in (bad.slow_body, bad.endless_body, bad.gzip_bomb)
            yield Behaviour(place, act.__name__.replace("_", " "), lambda hub, act=act: act, may_answer=harmless)
    for place in ("listing", "config", "about", "range", "whole"):
        yield Behaviour(place, "503 for ever", lambda hub: bad.status(503, Retry_After="0"))
        yield Behaviour(place, "418", lambda hub: bad.status(418))


def _redirects() -> Iterator[Behaviour]:
    for place in ("listing", "config about", "config", "range"):
        for name, where in {
            "to itself": "{hub}/api/models/" + REPO, "to a file": "file:///etc/passwd", "to nothing": "http://",
            "to another host": "{store}/store/nothing", "to another port's refusal": "http://127.0.0.1:9/x",
        }.items():  # fmt: skip
            if place == "config" and name == "to itself":
                where = "{hub}/" + f"{REPO}/resolve/{COMMIT}/config.json"

            def act(hub: Hub, where: str = where) -> Act:
                assert hub.store is not None
                there = where.format(hub=hub.address, store=hub.store.address)
                return bad.status(302, Location=there)

            # A server that sends something else than ranges is asked for the whole file.
            yield Behaviour(place, f"redirect {name}", act, may_answer=place == "range")


def _listings() -> Iterator[Behaviour]:
    names = {
        "..\\evil.safetensors": ["..\\evil.safetensors"], "../evil": ["../../evil.safetensors"],
        "an absolute name": ["/tmp/evil.safetensors"], "a drive": ["C:evil.safetensors"],
        "NUL in a name": ["a\0b.safetensors"], "half a character": ["\ud800.safetensors"],
        "a long name": ["a" * 5000 + ".safetensors"], "an empty name": [""],
        "100,000 names": [f"{i}.txt" for i in range(10**5)],
        "control characters": ["\x1b[31m\r\n.safetensors"], "a name of a query": ["x?y#z.safetensors"],
    }  # fmt: skip
    for name, given in names.items():
        yield Behaviour("listing", name, lambda hub, given=given: bad.listing(names=given))
    values = {
        "a commit that is a path": {"sha": "../../../evil"}, "a commit that is a number": {"sha": 5},
        "no files": {"siblings": None}, "files that are numbers": {"siblings": [1, 2]},
        "names that are lists": {"siblings": [{"rfilename": ["x"]}]}, "files that are a text": {"siblings": "abc"},
    }  # fmt: skip
    for name, said in values.items():
        yield Behaviour("listing", name, lambda hub, said=said: bad.listing(**said))


def _abouts() -> Iterator[Behaviour]:
    for place in ("config about", "tokenizer about"):
        for etag in ("/tmp/headspan-evil-etag", "../../../evil", "", '""', "..", "x" * 5000, "a\tb", "a b;c"):
            yield Behaviour(
                place, f"ETag {etag[:20]!r}", lambda hub, etag=etag: bad.headers(ETag=etag), may_answer=False
            )
    for name, changed in {
        "X-Linked-Etag is a path": {"X_Linked_Etag": '"/tmp/headspan-evil-etag"'},
        "negative size": {"X_Linked_Size": "-5"}, "size of a text": {"X_Linked_Size": "much"},
        "size of 10^30": {"X_Linked_Size": "1" + "0" * 30}, "size of a petabyte": {"X_Linked_Size": "1" + "0" * 15},
        "size 0": {"X_Linked_Size": "0"}, "size too small": {"X_Linked_Size": "5000"},
        "another commit": {"X_Repo_Commit": "f" * 40}, "a commit that is a path": {"X_Repo_Commit": "../../evil"},
        "no etag at all": {"ETag": None, "X_Linked_Etag": None},
    }.items():  # fmt: skip
        yield Behaviour("about", name, lambda hub, changed=changed: bad.headers(**changed))


def _json() -> Iterator[Behaviour]:
    def deep(reply: bad.Reply) -> Iterator[bytes | float]:
        yield bad.Reply(200, reply.headers, b"[" * 2_000_000).whole()

    def large(reply: bad.Reply) -> Iterator[bytes | float]:
        yield bad.Reply(200, reply.headers, b"[" + b"[]," * 7_000_000 + b"[]]").whole()

    shards = {f"h.{i}": f"x-{i}.safetensors" for i in range(20_000)}
    index = {
        "that leads out": {"h.0.attn.c_attn.weight": "../../../evil.safetensors"}, "of 20,000 shards": shards,
        "that leads out with backslashes": {"h.0.attn.c_attn.weight": "..\\..\\evil.safetensors"},
    }  # fmt: skip
    for place in ("listing", "refs"):
        yield Behaviour(place, "deep JSON", lambda hub: deep)
        yield Behaviour(place, "JSON of many values", lambda hub: large)
        yield Behaviour(place, "no JSON", lambda hub: bad.body(b"<html>hello</html>"))
        yield Behaviour(place, "JSON of another kind", lambda hub: bad.body(b'["x", null]'))
    for place in ("config", "index", "tokenizer"):  # whose hash the hub has told before
        yield Behaviour(place, "other bytes", lambda hub: bad.other_bytes)
        yield Behaviour(place, "an empty body", lambda hub: bad.body(b""))
    for name, weight_map in index.items():
        content = json.dumps({"weight_map": weight_map}).encode()
        yield Behaviour("files", f"an index {name}", lambda hub, content=content: _with_index(hub, content))


def _with_index(hub: Hub, content: bytes) -> Act:
    """An honest hub of a hostile repository."""
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = content
    return bad.honest


def _ranges() -> Iterator[Behaviour]:
    for place in ("header", "range"):
        for name, changed in {
            "of another place": {"Content_Range": "bytes 5-10/100"}, "without a place": {"Content_Range": None},
            "of a file of another size": {"Content_Range": "bytes 0-1048575/99999999999"},
            "that are not a range": {"Content_Range": "bytes " + "9" * 5000},
            "with a path as ETag": {"ETag": '"/tmp/evil"'},
        }.items():  # fmt: skip
            yield Behaviour(place, f"ranges {name}", lambda hub, changed=changed: bad.headers(**changed))
        yield Behaviour(place, "ranges without ETag", lambda hub: bad.headers(ETag=None), may_answer=True)
        yield Behaviour(place, "416", lambda hub: bad.status(416), may_answer=True)
        yield Behaviour(place, "more than was asked for", lambda hub: bad.body(bytes(30 << 20)))
        yield Behaviour(place, "nothing", lambda hub: bad.body(b""))
    yield Behaviour(
        "range", "another version from the second on", lambda hub: bad.steps(bad.honest, bad.headers(ETag='"x"'))
    )
    yield Behaviour("whole", "other bytes", lambda hub: bad.other_bytes)
    yield Behaviour("whole", "other bytes, not linked", lambda hub: bad.other_bytes, linked=False)
    yield Behaviour("whole", "too short", lambda hub: bad.body(bytes(1000)))


def _poison() -> Iterator[Behaviour]:
    """Hubs that say true names and send other bytes; then an honest one is asked."""
    wrong = repository(seed=5)

    def lie(name: str) -> Callable[[Hub], Act]:
        def replace(hub: Hub) -> Act:
            hub.files[name] = wrong[name] if name.endswith(".safetensors") else hub.files[name].replace(b"4", b"2")
            return bad.honest

        return replace

    def ranges(reply: bad.Reply) -> Iterator[bytes | float]:
        begin = int(reply.headers["Content-Range"].split()[1].partition("-")[0])
        yield reply.head() + wrong["model.safetensors"][begin : begin + len(reply.body)]

    for linked in (True, False):
        kind = "" if linked else ", not linked"
        yield Behaviour("range", f"poison: other bytes{kind}", lambda hub: ranges, poison=True, linked=linked)
        yield Behaviour("files", f"poison: another config{kind}", lie("config.json"), poison=True, linked=linked)
        yield Behaviour("files", f"poison: other weights{kind}", lie("model.safetensors"), poison=True, linked=linked)


class HostileHub:
    """A kind of cases of the fuzzer: one behaviour, against one command."""

    cpu_seconds, memory = 100.0, 8 << 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = behaviours()
        self.files = {1: repository(), 2: repository(shards=2)}
        vocabulary = json.dumps({f"token{i}": i for i in range(5000)}).encode()
        self.files[1]["vocab.json"] = vocabulary
        copy = folder / "copy"
        copy.mkdir(parents=True)
        for name, content in self.files[1].items():
            (copy / name).write_bytes(content)
        self.right = hs.score(str(copy), "pk", "flow")

    def case(self, chance: random.Random) -> Behaviour:
        return chance.choice(self.table)

    def run(self, case: Behaviour) -> list[str]:
        measured = self.measure(case)
        return [measured.err] if measured.code == 2 else []

    def measure(self, case: Behaviour) -> Measured:
        """Run one behaviour and judge it."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        files = dict(self.files[2 if case.place == "index" else 1])
        try:
            with serving(files, case.linked) as hub:
                assert hub.store is not None or not case.linked
                act = case.act(hub)
                for server in filter(None, (hub, hub.store)):
                    server.place, server.act = case.place, act
                measured = self._command(hub, home, COMMANDS.get(case.place, SCORE))
                self._judge(case, hub, home, measured)
            if case.poison:
                self._ask_honest(case, home)
            return measured
        finally:
            shutil.rmtree(home)

    def _ask_honest(self, case: Behaviour, home: Path) -> None:
        """After a poisoner an honest hub, for the same repository and for another one with the same files."""
        with serving(dict(self.files[1]), case.linked) as honest:
            for repo in (REPO, OTHER):
                again = self._command(honest, home, ("score", repo, *SCORE[2:]))
                if again.code != 0 or not self._is_right(home):
                    raise Finding(f"{case}: an honest hub gave {again.code} {again.err} and maybe wrong scores")

    def _command(self, hub: Hub, home: Path, words: tuple[str, ...]) -> Measured:
        variables = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        variables |= {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        variables |= {"HEADSPAN_CACHE_DIR": str(home / "ours"), "HF_TOKEN": TOKEN, "HEADSPAN_HUB_TIMEOUT": str(WINDOW)}
        variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        began, disk, memory = time.monotonic(), 0, 0
        out, err = home.with_suffix(".out"), home.with_suffix(".err")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "headspan", *words], env=variables, cwd=home, stdout=stdout, stderr=stderr
            )
            while True:
                disk, memory = max(disk, bytes_in(home)), max(memory, most_memory(child.pid))
                if child.poll() is not None:
                    break
                if time.monotonic() - began > SECONDS or disk > 4 * DISK:
                    child.kill()
                time.sleep(0.05)
        texts = [path.read_text(errors="replace") for path in (out, err)]
        out.unlink()
        err.unlink()
        seconds = time.monotonic() - began
        return Measured(child.returncode, texts[0], texts[1].strip(), seconds, memory, disk)

    def _judge(self, case: Behaviour, hub: Hub, home: Path, got: Measured) -> None:
        """Raise what is wrong."""
        took = f"{got.seconds:.0f} s, {got.memory >> 20} MB, disk {got.disk >> 20} MB"
        shown = f"{case}: code {got.code}, {took}: {got.err[:300]}"
        if got.seconds > SECONDS or got.memory > MEMORY or got.disk > DISK:
            raise Finding(f"too much of time, memory or disk: {shown}")
        if got.code not in ((0, 2) if case.may_answer or case.poison else (2,)):
            raise Finding(f"the exit code: {shown}")
        if got.code == 2 and (len(got.err.splitlines()) != 1 or got.out or not got.err.isprintable()):
            raise Finding(f"not one sentence: {shown}")
        if got.code == 0 and not case.poison and not self._is_right(home):
            raise Finding(f"a wrong score: {shown}")
        if hub.store is not None and hub.store.told:
            raise Finding(f"the token was sent to somebody else: {shown}")
        left = [path for path in home.rglob("*") if path.name.endswith((".tmp", ".incomplete", ".lock"))]
        outside = {path.name for path in home.iterdir()} - {"hf", "ours", "r.safetensors"}
        evil = [path for path in (Path("/tmp/headspan-evil-etag"), Path("/tmp/evil")) if path.exists()]
        if left or outside or evil or (got.code == 2 and (home / "r.safetensors").exists()):
            raise Finding(f"left behind {[*left, *outside, *evil][:3]}: {shown}")

    def _is_right(self, home: Path) -> bool:
        scores = hs.load(home / "r.safetensors")
        return all(
            np.array_equal(scores[key].values, self.right[key].values, equal_nan=True) for key in self.right.arrays
        )


def most_memory(process: int) -> int:
    """The most memory that a process has held so far."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0  # it ended meanwhile
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def bytes_in(folder: Path) -> int:
    """What the files of a folder take."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # it vanished meanwhile
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="behaviours with this in their name")
    options = parser.parse_args()
    findings, most, count = 0, [0.0, 0, 0], 0
    with tempfile.TemporaryDirectory(prefix="headspan-hub-") as name, ThreadPoolExecutor(3) as pool:
        kind = HostileHub(Path(name))

        def measure(case: Behaviour) -> Measured | str:
            try:
                return kind.measure(case)
            except Finding as error:
                return str(error)

        chosen = [case for case in kind.table if options.only in str(case)]
        for case, got in zip(chosen, pool.map(measure, chosen), strict=True):
            count += 1
            if isinstance(got, str):
                findings += 1
                print(f"FINDING {got}", flush=True)
            else:
                most = [max(pair) for pair in zip(most, (got.seconds, got.memory, got.disk), strict=True)]
                said = got.err[:150] or "answered"
                print(
                    f"{case}: {got.seconds:.1f} s, {got.memory >> 20} MB, disk {got.disk >> 20} MB: {said}", flush=True
                )
    print(
        f"{count} behaviours, {findings} findings; at most {most[0]:.0f} s, {most[1] >> 20} MB, disk {most[2] >> 20} MB"
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
