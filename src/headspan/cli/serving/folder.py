"""The one folder that may be read: names of results and models in it, and nothing outside.

A name is relative, without "..", and leads to a file or directory inside the folder after all links are followed.
(`LocalFiles` applies the same rule to the files of a model's directory.) Models that would be read from a pickle of
torch are refused, although headspan never unpickles objects. The built-in model is "demo". Models of the hub are
opened only if the user allowed it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from headspan.checkpoints.hub.repository import HubReference
from headspan.checkpoints.huggingface import TORCH_SUFFIXES
from headspan.checkpoints.untrusted import INDEX_LIMIT
from headspan.system.inputs import read_text
from headspan.vocabulary.errors import HeadspanError, quoted

BUILT_IN = "demo"
_DEEP, _MOST = 4, 2_000  # levels of folders, and entries, that a list visits
_LONGEST = 400  # characters of a name
_INDEX = "model.safetensors.index.json"


class Folder:
    """A folder that the user named; ``hub``: models of the hub may be downloaded."""

    def __init__(self, path: str | os.PathLike[str], hub: bool = False) -> None:
        self.hub = hub
        try:
            self.path = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise HeadspanError(f"{quoted(path)}: no such folder. Give one with results or models") from None
        if not self.path.is_dir():
            raise HeadspanError(f"{quoted(path)} is not a folder. Give one with results or models")

    def result(self, name: str) -> Path:
        """The file with this name."""
        found = self._inside(name)
        if not found.is_file():
            raise HeadspanError(f"{quoted(name)} is not a file. The tool files lists the results")
        if found.suffix.lower() in TORCH_SUFFIXES:
            raise HeadspanError(f"{quoted(name)} is a file of torch, which is not read here. Give a result of headspan")
        return found

    def model(self, name: str) -> str | Path:
        """The model with this name: in the folder, built in, or on the hub if that is allowed."""
        if name == BUILT_IN:
            return name
        _check(name)
        here = (self.path / name, Path(name).expanduser())  # a name of the hub must not mean a file elsewhere
        if self.hub and not any(map(os.path.lexists, here)) and HubReference.parse(name) is not None:
            return name
        found = self._inside(name)
        _refuse_pickles(found, name)
        return found

    def _inside(self, name: str) -> Path:
        _check(name)
        if Path(name).is_absolute() or ".." in Path(name).parts or name.startswith("~"):
            raise HeadspanError(f"{quoted(name)} is not a name in the folder. Give a relative one, without ..")
        try:
            found = (self.path / name).resolve(strict=True)
        except (OSError, RuntimeError):
            raise HeadspanError(f"there is no {quoted(name)} in the folder. See the tool files") from None
        if not found.is_relative_to(self.path):
            raise HeadspanError(f"{quoted(name)} leads out of the folder, so it is not read")
        if not (found.is_file() or found.is_dir()):
            raise HeadspanError(f"{quoted(name)} is neither a file nor a folder, so it is not read")
        return found

    def files(self) -> Iterator[tuple[str, str]]:
        """Names in the folder and what they are: result or model. Links and hidden files are left out."""
        left = _MOST
        for place, folders, names in os.walk(self.path):
            here = Path(place)
            deep = len(here.relative_to(self.path).parts)
            folders[:] = sorted(f for f in folders if not f.startswith(".") and deep < _DEEP)
            left -= len(names) + len(folders) + 1
            if left < 0:
                return
            if "config.json" in names:
                folders.clear()
                yield str(here.relative_to(self.path)), "model"
                continue
            for name in sorted(names):
                path = here / name
                if name.startswith(".") or path.is_symlink() or not path.is_file():
                    continue
                what = {".gguf": "model", ".safetensors": "result or model", ".json": "result, circuit or graph"}
                if path.suffix.lower() in what:
                    yield str(path.relative_to(self.path)), what[path.suffix.lower()]


def _check(name: str) -> None:
    if not name.strip() or len(name) > _LONGEST or not name.isprintable():
        raise HeadspanError(f"{quoted(name)} is not a name. The tool files lists the results and models")


def _refuse_pickles(path: Path, name: str) -> None:
    """Refuse a model whose weights would come from a file of torch."""
    if path.is_file():
        wrong = path.suffix.lower() in TORCH_SUFFIXES
    elif (path / "model.safetensors").is_file():
        return
    elif (path / _INDEX).is_file():
        try:
            content = json.loads(read_text(path / _INDEX, "", "index", most=INDEX_LIMIT))
            files = [str(file) for file in content["weight_map"].values()]
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise HeadspanError(f"{quoted(name)} has a damaged {_INDEX}") from None
        wrong = any(not file.endswith(".safetensors") for file in files)
    else:
        wrong = any(file.suffix.lower() in TORCH_SUFFIXES for file in path.iterdir())
    if wrong:
        raise HeadspanError(f"{quoted(name)} has its weights in files of torch, which are not read here. Convert it")
