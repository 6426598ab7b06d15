"""Where headspan keeps its own files: the user's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``HEADSPAN_CACHE_DIR``, or ``headspan`` in the system's cache folder. It need not exist yet."""
    given = os.environ.get("HEADSPAN_CACHE_DIR")
    if given:
        return Path(given).absolute()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "headspan" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headspan"
    standard = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore a relative path.
    return (Path(standard) if os.path.isabs(standard) else Path.home() / ".cache") / "headspan"
