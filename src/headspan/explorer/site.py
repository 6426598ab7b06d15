"""A static gallery: the pages of several results in one folder, with an index of pictures and key facts.

The gallery needs no server and loads nothing: links are relative, pictures are embedded in the index, and the
content security policy of every page forbids foreign scripts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from headspan.explorer.demo_measurements import with_shipped
from headspan.explorer.page import Report, filled, policy_of, static_text
from headspan.explorer.report import report
from headspan.models.weights import AttentionWeights
from headspan.plotting.preview import small_picture
from headspan.plotting.style import ROLE_COLOURS
from headspan.results.identity import short_name
from headspan.results.labels import GPT2_SMALL
from headspan.results.scores import Scores, is_result
from headspan.scoring.inputs import ScoresLike, given_scores, given_weights
from headspan.scoring.model_of_result import check_same_model, weights_of
from headspan.subspaces.metrics import metric_of
from headspan.system.arguments import checked
from headspan.system.atomic import is_temporary
from headspan.system.deprecation import renamed
from headspan.system.outputs import check_folder, is_ours, writing
from headspan.system.progress import Update, progress_bar
from headspan.vocabulary.errors import HeadspanError, refuse_ignored, visible
from headspan.vocabulary.words import counted, listed

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike

_INDEX = "index.html"
_FINDINGS = 2


class Page(NamedTuple):
    """One page: the name of its model, and its file."""

    name: str
    file: str


@dataclass(frozen=True)
class Site:
    """A finished gallery: its folder and its pages."""

    folder: Path
    pages: list[Page]

    def __repr__(self) -> str:
        return f"Site of {counted(len(self.pages), 'model')} in {self.folder}: open {self.folder / _INDEX}"


@renamed(results="scores", weights="model")
@checked
def site(
    folder: str | os.PathLike[str],
    scores: Mapping[str, ScoresLike] | Iterable[ScoresLike] | Scores | str | os.PathLike[str],
    *,
    model: Iterable[ModelLike] | AttentionWeights | str | os.PathLike[str] = (),
    title: str = "headspan gallery",
    tokens: int | None = None,
    force: bool = False,
    progress: Update | None = None,
) -> Site:
    """Write ``index.html`` and one page for every result into a folder.

    Parameters
    ----------
    folder
        A new or empty folder, or that of an earlier gallery.
    scores
        A result, its file, or a model to score now; usually a list of them. A mapping gives them other names than their
        own.
    model
        The model of a result, or a list of models, in any order: their pages get tokens and principal angles.
    tokens
        Tokens to list for every head and role, where there is a model; 10 by default.
    force
        Write into a folder that has other things in it; a file that is read is never replaced.

    Heads are coloured by their head scores where a result has them, and GPT-2 small by the labels that come with the
    package.
    """
    named = cast("Mapping[str, ScoresLike]", scores) if isinstance(scores, Mapping) else None
    given = _listed(scores) if named is None else list(named.values())
    if not given:
        raise HeadspanError(
            "a gallery needs at least one result. Give result files, as `hs.score(model)` makes them, or models"
        )
    models = [given_weights(one) for one in _listed(model)]
    loaded = [_loaded(one) for one in given]
    titles = [short_name(str(one.provenance.get("reference", "arrays"))) for one, _ in loaded]
    titles = titles if named is None else list(map(str, named))
    names = _file_names(titles)
    read: list[str | os.PathLike[str]] = [one for one in given if isinstance(one, (str, os.PathLike))]
    _check_kind(folder, force)
    check_folder(folder, dict.fromkeys([_INDEX, *names], "page"), inputs=read, force=force)
    opened = _matched([one for one, _ in loaded], [own for _, own in loaded], models)
    if not any(opened):
        refuse_ignored("without a model", tokens=tokens or None)
    cards: list[dict[str, Any]] = []
    pages: dict[str, str] = {}  # write nothing until every page has been made
    with progress_bar("making the gallery", progress) as update:
        for i, ((one, _), own, name, called) in enumerate(zip(loaded, opened, names, titles, strict=True)):
            update(i, len(names))
            known = with_shipped(one)
            listed = None if own is None else tokens
            page = report(known, own, labels=_labels(known), tokens=listed, progress=lambda done, total: None)
            pages[name] = page.html
            cards.append(_card(known, page, name, visible(called)))
    for name, html in {**pages, _INDEX: _index(title, cards)}.items():
        _write(Path(folder) / name, html, force)
    return Site(Path(folder), [Page(card["name"], card["file"]) for card in cards])


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, os.PathLike, Scores, AttentionWeights)) else list(given)


def _loaded(given: ScoresLike) -> tuple[Scores, AttentionWeights | None]:
    """Scores, with the weights where a model was given."""
    if isinstance(given, Scores) or (isinstance(given, (str, os.PathLike)) and is_result(given)):
        return given_scores(given), None
    opened = given_weights(given)
    return given_scores(opened), opened


def _matched(
    scores: Sequence[Scores], own: Sequence[AttentionWeights | None], models: Sequence[AttentionWeights]
) -> list[AttentionWeights | None]:
    """The weights of every result, or None. A model that belongs to no result is an error."""
    found = list(own)
    for model in models:
        fitting = [i for i, one in enumerate(scores) if _belongs(one, model)]
        if not fitting:
            raise HeadspanError(f"{model.reference} is not the model of any of these results. Leave it out of `model`")
        for i in fitting:
            found[i] = found[i] or weights_of(scores[i], model)
    return found


def _belongs(scores: Scores, model: AttentionWeights) -> bool:
    """Whether a result was made from these weights, folded or not."""
    try:
        opened = weights_of(scores, model)
        return check_same_model(scores, opened) is None
    except HeadspanError:
        return False


def _check_kind(folder: str | os.PathLike[str], force: bool) -> None:
    """Refuse a folder with other files. An interrupted gallery may have pages but no index."""
    place = Path(folder)
    if force or not place.is_dir() or is_ours(place / _INDEX, "page"):
        return
    if any(not is_temporary(entry.name) and not is_ours(entry, "page") for entry in place.iterdir()):
        raise HeadspanError(
            f"cannot write a gallery into {os.fspath(folder)}: it has other files. Choose a new or empty folder, or "
            "write into it with `force=True`"
        )


def _file_names(titles: Sequence[str]) -> list[str]:
    """A distinct plain file name for every page.

    >>> _file_names(["gpt2", "openai-community/gpt2", "GPT2", "index", "\\u202e/../<b>"])
    ['gpt2.html', 'openai-community-gpt2.html', 'gpt2-2.html', 'index-2.html', 'b.html']
    """
    taken, found = {"index"}, list[str]()
    for title in titles:
        stem = re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-.")[:80] or "model"
        name, number = stem, 2
        while name in taken:
            name, number = f"{stem}-{number}", number + 1
        taken.add(name)
        found.append(f"{name}.html")
    return found


def _labels(scores: Scores) -> str | None:
    """The built-in labels of a model, if any."""
    if scores.annotations.get("behaviour"):
        return "behaviour"
    return "gpt2" if scores.provenance.get("attention_hash") == GPT2_SMALL else None


def _card(scores: Scores, page: Report, file: str, name: str) -> dict[str, Any]:
    """What the index shows for one result."""
    table = scores.ports
    shared = f", {counted(len(table.kv), 'shared key/value head')}" if table.shared else ""
    layers = len({head.layer for head in table.query})
    facts = [
        f"{counted(layers, 'layer')}, {counted(len(table.query), 'head')}{shared}, d_model {scores.d_model:,}",
        f"{listed(metric_of(metric).title for metric in scores.metrics) or 'nothing'} for {_pairings(scores)}",
    ]
    first = page.payload["headline"]["text"]  # one sentence, which says all that its title does
    others = [(finding["title"], finding["text"]) for finding in page.payload["findings"] if finding["text"] != first]
    findings = [("", first), *others[: _FINDINGS - 1]]
    picture, caption = small_picture(scores, _labels(scores))
    folded = scores.provenance.get("folding", "none")
    return {
        "name": name, "file": file, "facts": facts, "findings": findings, "picture": picture,
        "caption": caption, "folded": "" if folded == "none" else str(folded), "size": f"{len(page.html) / 1e6:.1f} MB",
    }  # fmt: skip


def _pairings(scores: Scores) -> str:
    names = list(map(str, scores.pairings))
    return listed(names) if len(names) <= 4 else f"{len(names)} pairings"


def _index(title: str, cards: list[dict[str, Any]]) -> str:
    from markupsafe import Markup

    colours = "".join(f"--role-{role}:{colour};" for role, colour in ROLE_COLOURS.items())
    style = f":root{{{colours}}}\n" + static_text(("base.css", "site.css"))
    return filled("site.html", title=visible(title), policy=policy_of(style), style=Markup(style), cards=cards)


def _write(path: Path, text: str, force: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path, "page", force=force) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))
