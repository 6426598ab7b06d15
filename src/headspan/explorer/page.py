"""Put payload, scripts and styles into one self-contained HTML file that may not load anything else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import headspan
from headspan.plotting.style import DENSITY, EDGE_REST, GROUP_COLOURS, HISTOGRAM, ROLE_COLOURS, SOURCE_DASHES
from headspan.system.arguments import checked
from headspan.system.outputs import writing
from headspan.vocabulary.errors import visible

STYLES = ("base.css", "parts.css")
REPORT_STYLES = (*STYLES, "watch.css", "task.css")
SCRIPTS = (
    "core.js", "model.js", "chance.js", "table.js", "routing.js", "evidence.js", "controls.js", "legend.js", "notes.js",
    "layout.js", "zoom.js", "tips.js", "circuit.js", "wiring.js", "flow.js", "headline.js", "glossary.js", "intro.js",
    "paths.js", "watch.js", "inspector.js", "heatmap.js", "scatter.js", "distribution.js", "heads.js", "task.js",
    "find.js", "save.js", "tables.js", "main.js",
)  # fmt: skip

_DASHES = {"-": "none", "--": "7 4", ":": "2 3", "-.": "8 3 2 3"}  # matplotlib's names as SVG lengths
# Characters that could end the data block, open a tag or break an old script parser; JSON allows escapes for all.
_ESCAPES = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(
    payload: dict[str, Any],
    template: str = "page.html",
    scripts: tuple[str, ...] = SCRIPTS,
    styles: tuple[str, ...] = REPORT_STYLES,
) -> str:
    """The whole page as text."""
    from markupsafe import Markup

    style, script = _palette_css() + static_text(styles), static_text(scripts)
    return filled(
        template,
        title=visible(payload["model"]["name"]),  # a file name may contain bytes that are not text
        policy=policy_of(style, script),
        style=Markup(style),
        script=Markup(script),
        payload=Markup(escaped_json(payload)),
    )


def filled(template: str, **values: Any) -> str:
    """Fill a template of the folder static; all text is escaped."""
    from jinja2 import Environment, FunctionLoader

    environment = Environment(
        autoescape=True, keep_trailing_newline=True, loader=FunctionLoader(lambda name: static_text((name,)))
    )
    return environment.get_template(template).render(version=headspan.__version__, **values)


def policy_of(style: str, script: str | None = None) -> str:
    """The content security policy, which allows only the page's own style, script and embedded images."""
    scripts = "" if script is None else f"script-src '{_hash(script)}'; "
    return (
        f"default-src 'none'; {scripts}style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def escaped_json(value: Any) -> str:
    """JSON that is safe inside a script element, for any strings.

    >>> escaped_json({"token": "</script>"})
    '{"token":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character, harmless in _ESCAPES.items():
        text = text.replace(character, harmless)
    # Some vocabularies contain lone surrogates, which cannot be encoded as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


@cache
def static_text(names: tuple[str, ...]) -> str:
    """The joined text of files in the folder static."""
    folder = resources.files("headspan.explorer") / "static"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _palette_css() -> str:
    """The palette of the figures as CSS variables for light and dark pages, and the style of every kind of edge."""
    colours = {f"role-{role}": colour for role, colour in ROLE_COLOURS.items()}
    groups = {"both": "both", "first only": "first", "second only": "second", "neither": "neither"}
    colours |= {f"group-{short}": GROUP_COLOURS[name] for name, short in groups.items()}
    colours |= {"histogram": HISTOGRAM, "density": DENSITY, "rest": EDGE_REST}
    light = "".join(f"--{name}:{colour};" for name, colour in colours.items())
    quiet = ("group-neither", "histogram", "rest")  # backgrounds: darkened rather than lightened on a dark page
    dark = "".join(f"--{name}:{_mixed(colour, 0 if name in quiet else 255)};" for name, colour in colours.items())
    edges = "".join(f".edge.to-{role}{{stroke:var(--role-{role})}}\n" for role in ROLE_COLOURS)
    edges += ".edge.rest,.effect-dot.rest{stroke:var(--rest)}\n.arrow.rest{fill:var(--rest)}\n"
    dashes = "".join(f".edge.from-{role}{{stroke-dasharray:{_dashes(dash)}}}\n" for role, dash in SOURCE_DASHES.items())
    dots = "".join(
        f".effect-dot.large.to-{role},.arrow.to-{role}{{fill:var(--role-{role})}}\n.effect-dot.small.to-{role}{{stroke:var(--role-{role})}}\n"
        for role in ROLE_COLOURS
    )
    return f':root{{{light}}}\n:root[data-theme="dark"]{{{dark}}}\n{edges}{dashes}{dots}'


def _dashes(dash: Any) -> str:
    """A matplotlib line style as SVG dash lengths.

    >>> _dashes(":"), _dashes((0, (3, 1)))
    ('2 3', '4.5 1.5')
    """
    return _DASHES[dash] if isinstance(dash, str) else " ".join(f"{1.5 * length:g}" for length in dash[1])


def _mixed(colour: str, grey: int, share: float = 0.35) -> str:
    """A colour mixed with white (255) or black (0).

    >>> _mixed("#000000", 255, 0.5)
    '#808080'
    """
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (grey - part) * share):02x}" for part in parts)


FRAME_HEIGHT = 820  # pixels of a notebook cell


def _no_picture() -> tuple[str | None, str]:
    return None, ""


@dataclass(frozen=True)
class Frame:
    """A page inside a notebook cell. It cannot reach the notebook around it."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        # Without allow-same-origin the page cannot reach the notebook.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{FRAME_HEIGHT}px;border:1px solid #ccc;border-radius:6px" '
            'title="headspan report"></iframe>'
        )


@dataclass(frozen=True)
class Report:
    """A finished page: ``save`` writes it, and a notebook shows a preview of it, or with ``show()`` the page itself.

    picture: draws the small picture of the preview, and gives it as a data URL with its caption.
    """

    payload: dict[str, Any] = field(repr=False)
    html: str = field(repr=False)
    picture: Callable[[], tuple[str | None, str]] = field(default=_no_picture, repr=False, compare=False)
    files: list[Path] = field(default_factory=list[Path], repr=False, compare=False)  # to which it was saved

    @checked
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the page; the file appears only when complete. force: replace a file that is not a headspan page."""
        with writing(path, "page", force=force) as temporary:
            temporary.write_text(self.html, encoding="utf-8")
        self.files.append(Path(path).absolute())

    def show(self) -> Frame:
        """The page itself, as the last line of a notebook cell; the notebook then contains all of it."""
        return Frame(self.html)

    def _repr_html_(self) -> str:
        from headspan.plotting.preview import preview

        file = next((file for file in reversed(self.files) if file.exists()), None)
        return preview(self.payload, len(self.html), file, self.picture())

    def __repr__(self) -> str:
        return f"Report of {self.payload['model']['name']}, {len(self.html) / 1e6:.1f} MB"
