"""Run the commands and the Python lines of docs/questions.md and write what they print into the page.

With --check, report what differs instead. Questions about real models need HEADSPAN_GPT2_DIR and HEADSPAN_SMOLLM2_GGUF;
without them, or without torch, they are left as they are.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from headspan.cli import _run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "questions.md"
MODELS = {"gpt2": "HEADSPAN_GPT2_DIR", "smollm2.gguf": "HEADSPAN_SMOLLM2_GGUF"}  # name in the page -> where it is
_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")


class Example(NamedTuple):
    """A command or a Python line of a question, what it prints in the page, and where that is."""

    question: str
    code: str
    output: str
    start: int

    @property
    def models(self) -> list[str]:
        """The real models that it needs."""
        return [name for name in MODELS if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.code)]


def examples(text: str) -> list[Example]:
    """Every block of code that has output after it; each question has a command and a Python line."""
    found: list[Example] = []
    for part in re.finditer(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        blocks = list(_BLOCK.finditer(part[2]))
        for code, output in itertools.pairwise(blocks):
            if code[1] != "text" and output[1] == "text":
                place = part.start(2) + output.start(2)
                found.append(Example(part[1], code[2].strip(), output[2].rstrip("\n"), place))
    return found


def setup(text: str) -> list[str]:
    """The code of the page before its first question."""
    return [match[2] for match in _BLOCK.finditer(text[: text.index("\n## ")])]


class Session:
    """Runs code in a folder, as a reader would: commands in 80 columns, Python lines one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, dict[str, Any]()

    def run(self, code: str) -> str:
        """What a command prints on stdout (on stderr, if nothing), or Python lines print."""
        out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
        os.environ["COLUMNS"] = "80"
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._run(code)
        finally:
            os.chdir(before)
        return (out.getvalue() or err.getvalue()).rstrip("\n")

    def _run(self, code: str) -> None:
        for line in code.splitlines():
            if line.startswith("headspan "):
                status = _run(shlex.split(line)[1:])
                assert status == 0, f"{line}: exit {status}"
            elif line.startswith("python "):
                sys.path.insert(0, str(ROOT / "examples"))
                import question_files  # pyright: ignore[reportMissingImports]

                sys.path.pop(0)
                question_files.main(self.folder)
            elif line:
                exec(compile(line, "questions.md", "single"), self.names)


def prepared(folder: Path, text: str) -> Session:
    """A session in which the setup of the page has run."""
    session = Session(folder)
    for name, variable in MODELS.items():
        if variable in os.environ:
            (folder / name).symlink_to(os.environ[variable])
    for code in setup(text):
        session.run(code)
    return session


def same(printed: str, expected: str) -> bool:
    """Whether two texts have the same words, and numbers that agree to 1 % or 0.02; a line … stands for any lines."""
    head, dots, tail = expected.partition("\n…\n")
    if dots:
        lines, first, last = printed.splitlines(), len(head.splitlines()), len(tail.splitlines())
        return same("\n".join(lines[:first]), head) and same("\n".join(lines[len(lines) - last :]), tail)
    words, numbers = zip(*((_NUMBER.sub("#", t).split(), _NUMBER.findall(t)) for t in (printed, expected)), strict=True)
    if words[0] != words[1] or len(numbers[0]) != len(numbers[1]):
        return False
    pairs = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in zip(*numbers, strict=True)]
    return all(abs(a - b) <= max(0.02, 0.01 * abs(b)) for a, b in pairs)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        session = prepared(Path(folder), text)
        for example in reversed(examples(text)):
            if any(MODELS[name] not in os.environ for name in example.models):
                continue
            printed = session.run(example.code)
            if same(printed, example.output):
                continue
            wrong.append(f"{example.code}\n{printed}")
            if "\n…\n" in example.output:
                head, tail = (len(part.splitlines()) for part in example.output.split("\n…\n"))
                lines = printed.splitlines()
                printed = "\n".join([*lines[:head], "…", *lines[len(lines) - tail :]])
            text = text[: example.start] + printed + text[example.start + len(example.output) :]
    if "--check" in sys.argv:
        sys.exit("\n\n".join(wrong))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
