"""Checks of output paths: an output never replaces an input, nor a file that headspan did not make.

Before any work: ``check_output(path, "result", inputs=[model, labels], force=force)`` (or `check_outputs` for several,
`check_folder` for a folder of files). To write: ``with writing(path, "json", force=force) as temporary: ...``.

Inputs are what a command was given to read and every file that this process has read (readers call
`remember_input`); for a model, also the files in the folder of its weights. They are recognised under any name:
relative, through links, in another case on a file system that ignores case. ``force`` replaces a file of another
kind, never an input.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headspan.system.atomic import atomic_path
from headspan.vocabulary.errors import HeadspanError

PathLike = str | os.PathLike[str]
_ENDS = 256 * 2**10  # bytes at each end of a file that are searched for the name of its maker
_HEADER = 100_000_000  # bytes: the largest header of a safetensors file
_NAME, _PATH = 255, 4095  # bytes of a file name and of a path that file systems take
_MODEL_ENDINGS = (".safetensors", ".json", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt")
# File names that a reader of models looks for: a new file of that name would become part of the model.
_MODEL_NAMES = re.compile(
    r"(pytorch_)?model.*\.(safetensors|bin|json)|.*config\.json|tokenizer.*|vocab.*|added_tokens.*"
)
# Files that mark the folder of a model, where figures and pages are not written.
_CHECKPOINT = re.compile(
    r"(pytorch_|adapter_|tf_)?model([-.].*)?\.(safetensors|bin|pth?|h5)(\.index\.json)?|sae_weights\.safetensors"
    r"|.*\.gguf|consolidated.*\.pth|(adapter_)?config\.json|tokenizer(_config)?\.(json|model)"
)
_STANDARD = re.compile(r"(pytorch_)?model\.(safetensors|bin)(\.index\.json)?")  # found by name, whatever is beside it
_SPECIAL = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
GENERATOR = "headspan"  # under "generator" in our JSON files
MADE_BY = "made by headspan"  # in a comment on the first lines of our text files

Ends = tuple[bytes, bytes]


def _has_metadata(kind: str) -> Callable[[Ends, Path], bool]:
    """Whether the header of a safetensors file says that headspan made it as this kind; scores have no kind."""

    def says_so(ends: Ends, path: Path) -> bool:
        with open(path, "rb") as file:  # another run may have put a new file there since: all is read from one
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER:
                return False
            header = json.loads(file.read(length))
        about = (header.get("__metadata__") or {}).get("headspan") if isinstance(header, dict) else None
        if not isinstance(about, str):
            return False
        found = json.loads(about)
        return not isinstance(found, dict) or found.get("kind", "result") == kind

    return says_so


def _contains(pattern: bytes, within: int = 8192, end: bool = False) -> Callable[[Ends, Path], bool]:
    expression = re.compile(pattern, re.DOTALL)
    return lambda ends, path: expression.search(ends[1] if end else ends[0][:within]) is not None


# The first lines of our tables identify them, because CSV readers would not skip a comment.
_CSV_HEADERS = (
    b"metric,pairing,rank,source,target,score,([a-z_]+,)*source_labels,target_labels",
    b"section,key,published,ours,verdict,note",
)
_TEXT = re.escape(MADE_BY).encode()
# How to recognise a file that headspan made, by kind. Every other kind is a safetensors file that says so.
_OURS: dict[str, Callable[[Ends, Path], bool]] = {
    "page": _contains(rb'<meta name="generator" content="headspan'),
    "png": _contains(rb"\A\x89PNG.*tEXtSoftware\0headspan"),
    "pdf": _contains(rb"/Creator \(headspan\)", end=True),
    "svg": _contains(rb"<dc:creator>.{,80}<dc:title>headspan</dc:title>"),
    "graphml": _contains(rb"\A(<\?xml[^>]*\?>\s*)?<!-- " + _TEXT),
    "json": _contains(rb'\A\s*\{\s*"((generator|format)"\s*:\s*"headspan|identity"\s*:\s*\{\s*"L\d+H\d+"\s*:)'),
    "pt": _contains(rb"\APK\x03\x04.*generator.{,12}headspan"),
    "csv": _contains(rb"\A(# " + _TEXT + rb"|(" + b"|".join(_CSV_HEADERS) + rb")\r?\n)"),
    "markdown": _contains(rb"\A[^\n]*\n*<!-- " + _TEXT + rb"|\A<!-- " + _TEXT),
}

_read: dict[tuple[int, int], str] = {}
_model_folders: dict[tuple[int, int], str] = {}


def remember_input(path: PathLike, *, model: bool = False) -> None:
    """Record that a file is being read, so that no output replaces it. ``model``: files in its folder count too."""
    with suppress(OSError, ValueError):
        whole = os.path.realpath(path)
        _read[_identity(os.stat(whole))] = whole
        if model:
            for folder in {os.path.dirname(whole), os.path.dirname(os.path.abspath(path))}:
                _model_folders[_identity(os.stat(folder))] = folder


def check_output(
    path: PathLike, kind: str, *, inputs: Iterable[PathLike | None] = (), force: bool = False, ending: str | None = None
) -> Path:
    """The file to write, links resolved; raises if it must not be written. Nothing is created.

    kind: what will be written: page, png, pdf, svg, csv, json, pt, graphml, markdown, or a kind of result.
    inputs: what is read for it; a text that is not an existing path (a hub id, a label list) is ignored.
    """
    target = _ordinary_place(path)
    if ending is not None and not os.fspath(path).lower().endswith(ending):
        raise _refusal(path, f"its name must end in {ending}")
    given = [one for one in inputs if isinstance(one, (str, os.PathLike))]  # a damaged result may hold a number here
    if target.exists():
        _check_replaceable(path, target, kind, given, force)
    else:
        _check_is_no_model_file(path, target, given)
        if kind not in _OURS and _is_model_without_standard_name(target.parent):
            raise _refusal(
                path, "its folder holds a model, whose weights it could be mistaken for; choose another folder"
            )
    _check_folder_takes_files(path, target.parent)
    return target


def check_outputs(
    outputs: Iterable[tuple[PathLike, str]], *, inputs: Iterable[PathLike | None] = (), force: bool = False
) -> None:
    """`check_output` for the files of one command, which must all be different."""
    given = list(inputs)
    seen: dict[Path, PathLike] = {}
    for path, kind in outputs:
        target = check_output(path, kind, inputs=given, force=force)
        if target in seen:
            raise _refusal(
                path, f"another output has the same path ({os.fspath(seen[target])}): give each output its own file"
            )
        for other in seen:
            if other in target.parents or target in other.parents:
                raise _refusal(path, f"it would be inside {os.fspath(seen[other])}, which is another output file")
        seen[target] = path


def check_folder(
    folder: PathLike, files: Mapping[str, str], *, inputs: Iterable[PathLike | None] = (), force: bool = False
) -> None:
    """The same for files (name -> kind) of a folder, which may or may not exist."""
    place = _plain(folder)
    with _file_errors(folder):
        real = Path(os.path.realpath(place))
        if os.path.lexists(real) and not real.is_dir():
            raise _refusal(folder, "it is not a directory; give a directory")
        model = _model_in(real)
        if model is not None:
            raise _refusal(folder, f"it holds a model ({model}); choose another folder")
    _check_folder_takes_files(folder, real)
    check_outputs([(Path(place) / name, kind) for name, kind in files.items()], inputs=inputs, force=force)


@contextmanager
def writing(
    path: PathLike, kind: str, *, inputs: Iterable[PathLike | None] = (), force: bool = False
) -> Iterator[Path]:
    """A temporary path that becomes the output if the block succeeds; the path is always checked first."""
    with atomic_path(check_output(path, kind, inputs=inputs, force=force)) as temporary:
        yield temporary


def special_file(mode: int) -> str:
    """What is at a path with this mode, if it is not an ordinary file."""
    return next((what for test, what in _SPECIAL.items() if test(mode)), "a device")


def is_ours(path: PathLike, kind: str) -> bool:
    """Whether headspan made an existing file as this kind of file."""
    path = Path(path)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return False
            head = file.read(_ENDS)
            file.seek(max(0, os.fstat(handle).st_size - _ENDS))
            recognise = _OURS.get(kind) or _has_metadata(kind)
            return recognise((head, file.read(_ENDS)), path)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return False


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _refusal(path: object, why: str) -> HeadspanError:
    return HeadspanError(f"cannot write {os.fspath(path) if isinstance(path, os.PathLike) else path}: {why}")


@contextmanager
def _file_errors(path: PathLike) -> Iterator[None]:
    """Turn errors of the file system into a `HeadspanError` about the path."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(path, f"{reason[:1].lower()}{reason[1:]}; choose another place") from None
    except ValueError:
        raise _refusal(ascii(path), "this is not a valid file name; choose another one") from None


def _plain(path: Any) -> str:
    """A path as text; raises if it cannot be the name of a file."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise HeadspanError(f"an output is the path of a file, not {type(path).__name__}: give text or a Path")
    text = os.fspath(path)
    with _file_errors(text):
        encoded = os.fsencode(text)
    if not text.strip() or "\0" in text:
        raise _refusal(ascii(text), "this is not a valid file name; choose another one")
    if text == "-":
        raise _refusal(text, "this file cannot be written to standard output; give the name of a file")
    if len(encoded) > _PATH or any(len(os.fsencode(part)) > _NAME for part in Path(text).parts):
        raise HeadspanError(f"cannot write {text[:60]}…: the name is too long; choose a shorter one")
    return text


def _ordinary_place(path: PathLike) -> Path:
    """The real path of an output, links resolved: an ordinary file, or nothing yet."""
    text = _plain(path)
    with _file_errors(path):
        real = Path(os.path.realpath(text))
        if os.path.islink(text.rstrip("/")) and not os.path.lexists(real):
            raise _refusal(path, f"it is a link to {real}, which does not exist; give the name of the file itself")
        if text.endswith(("/", os.sep)):
            raise _refusal(path, "it names a directory; give the name of a file")
        try:
            mode = os.lstat(real).st_mode
        except FileNotFoundError:
            return real
        if not stat.S_ISREG(mode):
            raise _refusal(path, f"it is {special_file(mode)}; give the name of an ordinary file")
    return real


def _check_replaceable(path: PathLike, target: Path, kind: str, inputs: list[PathLike], force: bool) -> None:
    with _file_errors(path):
        found = os.stat(target)
    for given in inputs:
        if _same(given, found) or (not is_ours(target, kind) and _is_part_of(given, found)):
            raise _refusal(path, "it is one of the input files; choose another name")
    ours = is_ours(target, kind)
    if not ours and _was_read(found):
        raise _refusal(path, "headspan has read that file; choose another name")
    if not ours and target.suffix.lower() in _MODEL_ENDINGS and _in_model_folder(target, inputs):
        raise _refusal(path, "it is in the model's folder and may belong to the model; choose another name")
    if not ours and not force:
        raise _refusal(
            path,
            f"that file is not a headspan {kind}; choose another name, or replace it with `force=True`",
        )
    if not found.st_mode & 0o222 and not force:
        raise _refusal(path, "that file is write-protected; choose another name, or replace it with `force=True`")


def _check_is_no_model_file(path: PathLike, target: Path, inputs: list[PathLike]) -> None:
    if _MODEL_NAMES.fullmatch(target.name.lower()) and _in_model_folder(target, inputs):
        raise _refusal(path, "that name would make it part of the model in its folder; choose another name")


def _model_in(folder: Path) -> str | None:
    """The name of a file that marks a folder as a model's, or None."""
    with suppress(OSError), os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if _CHECKPOINT.fullmatch(entry.name.lower()))
        return next((name for name in found if not is_ours(folder / name, _kind_by_name(name))), None)
    return None


def _is_model_without_standard_name(folder: Path) -> bool:
    """Whether this folder's weights may have any name, so that another safetensors file would be ambiguous."""
    with suppress(OSError):
        names = os.listdir(folder)
        return "config.json" in names and not any(map(_STANDARD.fullmatch, names))
    return False


def _kind_by_name(name: str) -> str:
    return "result" if name.lower().endswith(".safetensors") else "json"


def _same(given: PathLike, found: os.stat_result) -> bool:
    with suppress(OSError, ValueError):
        return _identity(os.stat(os.path.expanduser(given))) == _identity(found)
    return False


def _is_part_of(given: PathLike, found: os.stat_result) -> bool:
    """Whether a file is in a model's directory or next to a model's file, under any name."""
    with suppress(OSError, ValueError):
        path = os.path.expanduser(given)
        if not os.path.isdir(path):
            if not os.path.isfile(path) or not path.lower().endswith(_MODEL_ENDINGS):
                return False
            path = os.path.dirname(os.path.abspath(path))
        with os.scandir(path) as entries:
            return any(_same(entry.path, found) for entry in entries if entry.name.lower().endswith(_MODEL_ENDINGS))
    return False


def _was_read(found: os.stat_result) -> bool:
    """Whether this process has read that file; a reused inode number does not count."""
    name = _read.get(_identity(found))
    return name is not None and _same(name, found)


def _in_model_folder(target: Path, inputs: list[PathLike]) -> bool:
    """Whether a file is in a folder that is given as a model or whose weights are read."""
    with suppress(OSError):
        found = os.stat(target.parent)
        name = _model_folders.get(_identity(found))
        return any(given is not None and _same(given, found) for given in (*inputs, name))
    return False


def _check_folder_takes_files(path: PathLike, folder: Path) -> None:
    """Refuse a folder that is not writable, by creating a file in the nearest existing folder."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    with _file_errors(path):
        if not folder.is_dir():
            raise _refusal(path, f"{folder} is not a directory; choose another place")
        probe = folder / f".headspan-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        finally:
            with suppress(OSError):
                probe.unlink()
