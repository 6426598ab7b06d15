"""What stands for a page where it is not opened: a small wiring diagram, and a preview for a notebook."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headspan.graphs.selection import wiring
from headspan.plotting import wiring_svg
from headspan.results.labels import LabelsLike
from headspan.results.scores import Scores
from headspan.subspaces.metrics import METRICS, metric_of
from headspan.vocabulary.errors import HeadspanWarning, visible
from headspan.vocabulary.heads import FLOW_PAIRINGS, Role

_EDGES = 12  # edges in the small picture, all of one pairing
_FINDINGS = 3


def small_picture(scores: Scores, labels: LabelsLike | None) -> tuple[str | None, str]:
    """A small wiring diagram as a data URL, and its caption."""
    metric = next((name for name in (*METRICS, *scores.metrics) if name in scores.metrics), "")
    pairing = next((p for p in FLOW_PAIRINGS[1:] + FLOW_PAIRINGS[:1] if (metric, p) in scores), None)
    if pairing is None:
        return None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadspanWarning)  # the page has given them
        small = wiring(scores, pairing, metric, _EDGES, labels=labels)
    if not small.edges:
        return None, ""
    read = {Role.Q: "queries", Role.K: "keys", Role.V: "values"}[pairing.target]
    data = base64.b64encode(wiring_svg(small).encode("utf-8")).decode("ascii")
    count = f"{len(small.edges)} strongest {pairing} edges" if len(small.edges) > 1 else f"strongest {pairing} edge"
    caption = f"The {count} by {metric_of(metric).title}: what is written for {read}"
    return f"data:image/svg+xml;base64,{data}", caption


def preview(payload: Mapping[str, Any], size: int, file: Path | None, picture: tuple[str | None, str]) -> str:
    """A page as a few lines of HTML: its model, where it is, its picture, its first findings or facts."""
    name = escape(visible(str(payload["model"]["name"])))
    url, caption = picture
    parts = [f"<p><b>Report</b> of {name}, {size / 1e6:.1f} MB. {_where(file)}</p>"]
    if url is not None:
        parts.append(f'<img src="{url}" alt="{escape(caption)}" style="max-width:520px;width:100%">')
        parts.append(f"<p><small>{escape(caption)}</small></p>")
    findings = [(found["title"], found["text"]) for found in payload.get("findings", ())[:_FINDINGS]]
    if payload.get("above_chance") is False:
        findings = [(payload["headline"]["title"], payload["headline"]["text"])]
    facts = list(dict(payload.get("facts", {})).items())
    lines = "".join(f"<li><b>{escape(str(a))}</b>: {escape(visible(str(b)))}</li>" for a, b in findings or facts)
    return "".join(parts) + (f"<ul>{lines}</ul>" if lines else "")


def _where(file: Path | None) -> str:
    """A link to the file of a page, or how to get one."""
    if file is None:
        return "<code>.save(&quot;report.html&quot;)</code> writes the page, <code>.show()</code> opens it here."
    inside = file.is_relative_to(Path.cwd())
    address = quote(file.relative_to(Path.cwd()).as_posix()) if inside else file.as_uri()
    return (
        f'It is in <a href="{escape(address)}" target="_blank" rel="noopener">{escape(visible(str(file.name)))}</a>; '
        "<code>.show()</code> opens it here."
    )
