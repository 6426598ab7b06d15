"""Settings of the documentation site, which docs/make_site.py builds."""

import inspect
import re

import headspan

project = "headspan"
author = "the headspan authors"
release = version = headspan.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_google_docstring = False
html_theme = "furo"
html_title = f"headspan {release}"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
# Docstrings are written for a terminal: some of their lists and formulas are not strict markup.
suppress_warnings = ["docutils", "ref.python", "misc.highlighting_failure"]

_ARGUMENT = re.compile(r"(\w+(?:, \w+)*) ?: (\S.*)")


def as_fields(app: object, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Our docstrings say ``name: what it is`` of an argument, in a terminal; here it becomes a list."""
    try:
        known = set(inspect.signature(thing).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    for i, line in enumerate(lines):
        found = _ARGUMENT.fullmatch(line)
        if found and set(found[1].split(", ")) <= known:
            lines[i] = f":param {found[1]}: {found[2]}".replace("_:", "\\_:")
        elif line.strip() in known and line.endswith("_"):
            lines[i] = line[:-1] + "\\_"
    after = [
        i for i in range(1, len(lines)) if lines[i].startswith(":param ") and not lines[i - 1].startswith(":param")
    ]
    for i in reversed(after):
        if lines[i - 1].strip() and not lines[i - 1].startswith(" "):
            lines.insert(i, "")
    if any(line.startswith(":param ") for line in lines):
        lines[:] = [line for line in lines if line not in ("Parameters", "----------")]


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", as_fields, priority=100)  # type: ignore[attr-defined]
