"""Files of torch.save, loaded without running any code in them.

Such a file is a pickle, and a pickle can run any code. torch's weights-only loader builds tensors and plain containers
and refuses everything else.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from headspan.system.inputs import reason
from headspan.vocabulary.errors import HeadspanError, missing_extra

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def load_plain(path: Path, what: str, instead: str) -> Any:
    """The content of a file: tensors, memory-mapped in torch's zip format, and plain values on the CPU.

    what: the kind of file in an error. instead: what to do about a file with other Python objects.
    """
    mmap = _check_zip(path)
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"reading {path.name}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles, which are read or refused anyway
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        found = _GLOBAL.search(str(error))
        if found or "weights_only" in str(error).lower() or "Weights only" in str(error):
            objects = f" ({found[1]})" if found else ""
            raise HeadspanError(
                f"{path} holds Python objects other than tensors{objects} and was not loaded,"
                f" because a pickle can run any code: {instead}"
            ) from None
        raise HeadspanError(f"{path} cannot be read as a {what}: {reason(error)}") from None


def _check_zip(path: Path) -> bool:
    """True for torch's zip format, False for the older plain pickle; a zip bomb is refused.

    torch stores its entries uncompressed, so their declared sizes cannot exceed the size of the file.
    """
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, NotImplementedError) as error:
        raise HeadspanError(f"{path} is a damaged zip file: {reason(error)}") from None
    declared = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or declared > size:
        raise HeadspanError(
            f"{path} holds compressed or overlapping entries ({declared} bytes declared in a file of {size}),"
            " which torch never writes: refused"
        )
    return True
