"""The checkpoints of a training run in order: revisions of a hub model by pattern, directories, files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from headspan.checkpoints.hub.api import list_revisions
from headspan.checkpoints.hub.file_cache import find_revisions
from headspan.checkpoints.hub.network import busy, patiently, unreachable
from headspan.checkpoints.hub.repository import HubReference, explained
from headspan.system.inputs import mode_of
from headspan.vocabulary.errors import HeadspanError

_PATTERN = re.compile(r"[*?\[]")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class Checkpoint(NamedTuple):
    """One step of a series.

    ref: what is opened. step: its number, read from its name, or its place in the series.
    hub: the repository and revision, where it is one; commit: the commit of the revision, if known.
    """

    name: str
    ref: Any
    step: int
    hub: HubReference | None = None
    commit: str | None = None


def step_number(name: str) -> int | None:
    """The number of a step in a name: the one after "step" or "checkpoint", else the last there is.

    >>> step_number("org/model@step1000"), step_number("checkpoint-50"), step_number("stage1-step5-tokens20B")
    (1000, 50, 5)
    >>> step_number("main") is None
    True
    """
    said = re.findall(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,15})", name, re.IGNORECASE)
    numbers = said or re.findall(r"\d{1,15}", name)
    return int(numbers[-1]) if numbers else None


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts step9 before step10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def find_checkpoints(refs: Any, *, steps: Sequence[int] | None = None, last: int | None = None) -> list[Checkpoint]:
    """All checkpoints that the references name, in order; patterns are replaced by what they match, in natural order.

    steps: only these steps, by the numbers in their names. last: only this many from the end.
    """
    if steps is not None and last is not None:
        raise HeadspanError("give either the steps or the number of last checkpoints, not both")
    given = [refs] if isinstance(refs, (str, os.PathLike)) or not isinstance(refs, Iterable) else list(refs)
    listings: dict[str, dict[str, str] | None] = {}
    found = [checkpoint for place, ref in enumerate(given) for checkpoint in _expand(ref, place, listings)]
    if steps is not None:
        found = _chosen(found, steps)
    if last is not None:
        if last < 1:
            raise HeadspanError(f"cannot take the last {last} checkpoints: give a number of 1 or more")
        found = found[-last:]
    if len(found) < 2:
        names = found[0].name if found else "none"
        raise HeadspanError(f"a series needs at least two checkpoints, but there is {len(found)} ({names})")
    twice = next((one.name for i, one in enumerate(found) if one.name in {c.name for c in found[:i]}), None)
    if twice is not None:
        raise HeadspanError(f"{twice} is given twice: give each checkpoint once")
    numbers = [checkpoint.step for checkpoint in found]
    if -1 in numbers or len(set(numbers)) < len(numbers):  # not every name has a number of its own: count
        found = [checkpoint._replace(step=place) for place, checkpoint in enumerate(found)]
    return found


def _expand(ref: Any, place: int, listings: dict[str, dict[str, str] | None]) -> list[Checkpoint]:
    if not isinstance(ref, (str, os.PathLike)):
        name = str(getattr(ref, "reference", type(ref).__name__))
        return [Checkpoint(f"{name} [{place}]", ref, place)]
    text = os.fspath(ref)
    path = Path(os.path.expanduser(text))
    if text == "demo" or mode_of(path) is not None:
        return [Checkpoint(text, text, _number(path.name))]
    repo, at, revision = text.partition("@")
    if _PATTERN.search(text) and not (at and HubReference.parse(repo)):
        paths = sorted(glob.glob(str(path)), key=natural)
        if not paths:
            raise HeadspanError(f"no file or directory matches {text[:200]}")
        return [Checkpoint(path, path, _number(Path(path).name)) for path in paths]
    hub = HubReference.parse(repo if _PATTERN.search(text) else text)
    if hub is None or isinstance(ref, os.PathLike):
        raise HeadspanError(f"{text[:200]}: no such file or directory, and not the id of a model on the hub")
    if hub.repo not in listings:
        listings[hub.repo] = _revisions(hub.repo)
    listed = listings[hub.repo]
    if _PATTERN.search(text):
        return _matching(hub.repo, revision, listed)
    return [_one(hub, listed)]


def _number(name: str) -> int:
    number = step_number(name)
    return -1 if number is None else number


def _matching(repo: str, pattern: str, listed: dict[str, str] | None) -> list[Checkpoint]:
    """The revisions of a repository that match a pattern."""
    known = find_revisions(repo) if listed is None else listed
    names = sorted((name for name in known if fnmatchcase(name, pattern)), key=natural)
    if not names:
        where = "in the local cache, and the hub cannot be reached" if listed is None else "on the hub"
        some = ", ".join(sorted(known, key=natural)[:5]) + ("…" if len(known) > 5 else "")
        raise HeadspanError(
            f"no revision of {repo} matches {pattern[:80]!r} {where}: there are {len(known)} ({some or 'none'})"
        )
    return [
        Checkpoint(f"{repo}@{name}", f"{repo}@{name}", _number(name), HubReference(repo, name), known[name])
        for name in names
    ]


def _one(hub: HubReference, listed: dict[str, str] | None) -> Checkpoint:
    """A revision by name; raises before any work if it does not exist."""
    revision = hub.revision or "main"
    commit = (listed or {}).get(revision)
    if commit is None and _COMMIT.fullmatch(revision):
        commit = revision if len(revision) == 40 else None
    elif commit is None and listed is not None and not revision.startswith("refs/"):
        near = sorted(listed, key=natural)
        some = ", ".join([*near[:3], "…", near[-1]] if len(near) > 4 else near)
        raise HeadspanError(f"{hub.repo} has no revision {revision!r} on the hub: it has {len(listed)} ({some})")
    return Checkpoint(str(hub), str(hub), _number(hub.revision or ""), hub, commit)


def _revisions(repo: str) -> dict[str, str] | None:
    """Branches and tags of a repository with their commits, from the hub; None where it cannot be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    with explained(HubReference(repo)):
        try:
            return patiently(lambda: list_revisions(repo), busy)
        except Exception as error:
            if unreachable(error):
                return None
            raise


def _chosen(found: Sequence[Checkpoint], steps: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints of some steps; every one of them must be there."""
    by_number = {checkpoint.step: checkpoint for checkpoint in found}
    missing = [step for step in steps if step not in by_number]
    if missing:
        there = sorted(number for number in by_number if number >= 0)
        shown = ", ".join(map(str, there[:8])) + ("…" if len(there) > 8 else "")
        raise HeadspanError(f"there is no step {missing[0]} in this series: it has {len(there)} ({shown})")
    return [by_number[step] for step in dict.fromkeys(steps)]
