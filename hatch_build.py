"""The parts of the package's metadata that depend on where it is published: the links of its README, and its addresses.

With HEADSPAN_URL, the address of the repository on a forge, links to files become absolute and the package names its
home. Without it they would lead nowhere on an index page, so only their texts stay.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_CODE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]*\]\([^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)", re.IGNORECASE)


def for_index(text: str, address: str | None, reference: str) -> str:
    """A README whose links to files of the repository work on another page.

    >>> for_index("![a](b.png) see [the docs](docs/x.md#y)", None, "v1")
    ' see the docs'
    >>> for_index("see [the docs](docs/x.md#y), [top](#top)", "https://forge.example/me/it", "v1")
    'see [the docs](https://forge.example/me/it/blob/v1/docs/x.md#y), [top](#top)'
    """

    def link(match: re.Match[str]) -> str:
        image, shown, target = match.groups()
        if address:
            return f"{image}[{shown}]({address}/{'raw' if image else 'blob'}/{reference}/{target})"
        return "" if image else shown

    parts = _CODE.split(text)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def addresses(address: str | None) -> dict[str, str]:
    """The addresses that an index shows beside the README."""
    if not address:
        return {}
    files = f"{address}/blob/main"
    return {
        "Source": address,
        "Issues": f"{address}/issues",
        "Documentation": f"{files}/docs/cookbook.md",
        "Changelog": f"{files}/CHANGELOG.md",
    }


class Metadata(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = os.environ.get("HEADSPAN_URL", "").rstrip("/") or None
        if address and not re.fullmatch(r"https://[^\s()\[\]]+", address):
            raise ValueError(f"HEADSPAN_URL is {address!r}. Give the https address of the repository")
        version = str(metadata["version"])
        reference = "main" if "dev" in version else f"v{version}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, address, reference)}
        metadata["urls"] = addresses(address)
