"""Classes of heads: the lists that come with the package, a user's CSV file, or the heads of a task's circuit.

>>> labels = Labels.load("gpt2-ioi")
>>> labels.of("L5H5"), len(labels), len(labels.names)
(('induction',), 36, 7)
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from headspan.results.tabular import csv_text, html_table, text_table
from headspan.system.arguments import checked
from headspan.system.inputs import input_file, read_text
from headspan.system.outputs import MADE_BY, writing
from headspan.vocabulary.errors import HeadspanError, quoted
from headspan.vocabulary.heads import Head, is_head_name
from headspan.vocabulary.ports import PortTable

# Name -> the shipped files that it means.
SHIPPED = {
    "gpt2-ioi": ("gpt2-ioi",),
    "gpt2-identity": ("gpt2-identity",),
    "gpt2": ("gpt2-ioi", "gpt2-identity"),
}
# The attention weights that the shipped lists describe, by hash: OpenAI's GPT-2 small as it was published.
GPT2_SMALL = "eb6de7b7ff6bb81b91df313c9a65fef47d9a544d2ebc9ab9fb562daa289aaa8d"


@dataclass(frozen=True, repr=False)
class Labels:
    """Which classes every labelled head belongs to; a head may have several."""

    classes: Mapping[Head, tuple[str, ...]]
    source: str = "given"

    def __post_init__(self) -> None:
        """Accept names of heads and single classes too, as `from_dict` does."""
        if not all(isinstance(head, Head) and isinstance(value, tuple) for head, value in self.classes.items()):
            object.__setattr__(self, "classes", Labels.from_dict(self.classes).classes)

    @classmethod
    @checked
    def from_pairs(cls, pairs: Iterable[tuple[str | Head, str]], source: str = "given") -> Labels:
        """Labels from (head, label) pairs, in order; a pair given twice counts once.

        >>> Labels.from_pairs([("L0H1", "duplicate"), ("L0H1", "identity")]).of("L0H1")
        ('duplicate', 'identity')
        """
        classes: dict[Head, tuple[str, ...]] = {}
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], str)):
                seen = str(pair)[:60]
                raise HeadspanError(f"labels are pairs of a head and a text, like L5H5 and induction, not {seen}")
            name, label = pair
            head = Head.parse(name)
            classes[head] = tuple(dict.fromkeys((*classes.get(head, ()), label)))
        return cls(classes, source)

    @classmethod
    @checked
    def from_dict(cls, classes: Mapping[Any, Any], source: str = "given") -> Labels:
        """Labels from a dict: of every head its class or classes, or of every class its heads.

        Heads are named, like ``"L5H5"``, or given as (layer, head).

        >>> one = Labels.from_dict({"L5H5": "induction", "L4H11": ["previous_token"]})
        >>> one == Labels.from_dict({"induction": [(5, 5)], "previous_token": ["L4H11"]})
        True
        """
        by_head = bool(classes) and all(_is_head(key) for key in classes)
        if not by_head and any(isinstance(heads, str) for heads in classes.values()):
            wrong = next(key for key in classes if not _is_head(key))
            raise HeadspanError(
                "labels as a dict are {'L5H5': 'induction'} or {'induction': ['L5H5']}, but "
                f"{str(wrong)[:60]!r} is not a head"
            )
        several = {key: [value] if isinstance(value, str) else value for key, value in classes.items()}
        pairs = [(key, one) for key, value in several.items() if _is_list(value) for one in value]
        if not all(map(_is_list, several.values())) or not all(isinstance(pair[by_head], str) for pair in pairs):
            raise HeadspanError("the values of a dict of labels are a class, a list of classes or a list of heads")
        return cls.from_pairs(((_named(a), b) if by_head else (_named(b), a) for a, b in pairs), source)

    @classmethod
    @checked
    def load(cls, name: str | os.PathLike[str]) -> Labels:
        """Shipped labels by name (``gpt2-ioi``, ``gpt2-identity``, ``gpt2`` for both), or those of a file.

        A file is a CSV file with the columns head,label, or a saved result with labels: the heads of a task's circuit.
        """
        if str(name) in SHIPPED:
            folder = Path(__file__).parents[1] / "data" / "labels"
            pairs = [pair for file in SHIPPED[str(name)] for pair in _read_csv(folder / f"{file}.csv")]
            return cls.from_pairs(pairs, str(name))
        if str(name).lower().endswith(".safetensors"):
            return _of_result(name)
        return cls.from_pairs(_read_csv(Path(name)), str(name))

    def rows(self) -> list[dict[str, Any]]:
        """One record per class: label, how many heads have it, and which."""
        members = {name: self.heads(name) for name in self.names}
        return [{"label": k, "count": len(v), "heads": " ".join(map(str, v))} for k, v in members.items()]

    def __repr__(self) -> str:
        return text_table(f"labels {self.source}: {len(self)} heads", self.rows())

    def _repr_html_(self) -> str:
        return html_table(f"labels {self.source}: {len(self)} heads", self.rows())

    @property
    def names(self) -> tuple[str, ...]:
        """All classes, in the order they first appear."""
        return tuple(dict.fromkeys(label for labels in self.classes.values() for label in labels))

    @checked
    def of(self, head: Head | str) -> tuple[str, ...]:
        """The classes of a head; empty when it has none."""
        return self.classes.get(Head.parse(head), ())

    @checked
    def joined(self, name: str) -> str:
        """The classes of a head by its name, joined by ``;``; empty for a node."""
        return ";".join(self.of(name)) if is_head_name(name) else ""

    @checked
    def heads(self, label: str) -> tuple[Head, ...]:
        """The heads of a class, in layer order."""
        found = tuple(sorted(head for head, labels in self.classes.items() if label in labels))
        if not found:
            raise HeadspanError(f"there is no class {label!r} in the labels {self.source}: they have {self._list()}")
        return found

    def __contains__(self, head: Head | str) -> bool:
        return Head.parse(head) in self.classes

    def __len__(self) -> int:
        """How many heads have a label."""
        return len(self.classes)

    @checked
    def for_model(self, table: PortTable) -> Labels:
        """These labels checked against a model's heads, with the classes of its group for a shared key/value head.

        A KV head is one subspace used by a group of query heads: it has every class of its group.
        Labels for heads that the model does not have are an error that names them.
        """
        known = set(table.heads)
        unknown = sorted(head for head in self.classes if head not in known)
        if unknown:
            raise HeadspanError(
                f"the labels {self.source} name heads that this model does not have: "
                f"{', '.join(map(str, unknown))}; its heads go from {table.query[0]} to {table.query[-1]}"
            )
        if not table.shared:
            return self
        groups = {head: (head, table.kv_of(head)) for head in self.classes}
        pairs = [(each, label) for head, both in groups.items() for each in both for label in self.classes[head]]
        return Labels.from_pairs(pairs, self.source)

    def doubt(self, provenance: Mapping[str, Any]) -> str | None:
        """A note if these labels are for GPT-2 small and a result may be of other weights."""
        if self.source not in SHIPPED or provenance.get("attention_hash") == GPT2_SMALL:
            return None
        return (
            f"the labels {self.source} are for the published weights of GPT-2 small, and "
            f"{provenance.get('reference', 'this model')} may be a different model: they may not apply to it"
        )

    def _list(self) -> str:
        return quoted(", ".join(self.names)) or "none at all"


# What is taken where labels are: also a dict (see `Labels.from_dict`), and the name or the file of some.
LabelsLike: TypeAlias = Labels | Mapping[Any, Any] | str | os.PathLike[str]


def _is_head(key: object) -> bool:
    """Whether a key of a dict of labels is a head."""
    if isinstance(key, tuple):
        parts = cast("tuple[object, ...]", key)
        return len(parts) == 2 and all(isinstance(part, (int, np.integer)) for part in parts)
    return isinstance(key, Head) or (isinstance(key, str) and is_head_name(key))


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping, Head))


def _named(head: Any) -> Any:
    """A head given as (layer, head), as in TransformerLens."""
    if isinstance(head, tuple) and _is_head(cast("object", head)):
        layer, index = cast("tuple[int, int]", head)
        return Head(int(layer), int(index))
    return cast("Any", head)


def _missing(path: str | os.PathLike[str]) -> str:
    return (
        f"there are no labels {str(path)[:200]!r}: give one of {', '.join(SHIPPED)}, a CSV file with the columns "
        "head,label or the result of a task"
    )


def _of_result(path: str | os.PathLike[str]) -> Labels:
    """The labels of a saved result."""
    from headspan.results.saving import load

    method = getattr(load(input_file(path, _missing(path))), "labels", None)
    if not callable(method):
        raise HeadspanError(
            f"{path} has no labels. `hs.task(model, task, circuit='auto', out='task.safetensors')` writes some"
        )
    return replace(cast("Labels", method()), source=str(path))


def _read_csv(path: Path) -> list[tuple[Head, str]]:
    """Rows of a label file; blank lines and lines that start with # are skipped."""
    lines = read_text(path, _missing(path), "text file of labels", encoding="utf-8-sig").splitlines()
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip() and not line.startswith("#")]
    rows = [(n, _cells(line, n, path)) for n, line in numbered]
    if not rows or [cell.lower() for cell in rows[0][1]] != ["head", "label"]:
        seen = f"begins with {quoted(','.join(rows[0][1]))}" if rows else "is empty"
        raise HeadspanError(f"{path} must begin with the line head,label but {seen}")
    pairs: list[tuple[Head, str]] = []
    for number, row in rows[1:]:
        if len(row) != 2 or not all(row):
            raise HeadspanError(
                f"line {number} of {path} must be a head and a label, like L5H5,induction, but is "
                f"{quoted(','.join(row))!r}"
            )
        try:
            pairs.append((Head.parse(row[0]), row[1]))
        except HeadspanError as error:
            raise HeadspanError(f"line {number} of {path}: {error}") from None
    if not pairs:
        raise HeadspanError(f"{path} has no labels after its first line: add lines like L5H5,induction")
    return pairs


def _cells(line: str, number: int, path: Path) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise HeadspanError(f"line {number} of {path} is not a line of a CSV file: {error}") from None


def classes_by_name(labels: Labels | None) -> dict[str, str]:
    """The classes of every labelled head by its name, joined by ``;``."""
    return {} if labels is None else {str(head): ";".join(classes) for head, classes in labels.classes.items()}


def with_labels(rows: list[dict[str, Any]], classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of edges with the classes of both heads, source_labels and target_labels; unchanged without classes."""
    ends = ("source", "target") if classes else ()
    return [row | {f"{end}_labels": classes.get(row[end].partition(".")[0], "") for end in ends} for row in rows]


def write_labels(labels: Labels, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """A label file (columns head,label) that `Labels.load` and the option --labels read."""
    rows = [{"head": str(head), "label": label} for label in labels.names for head in labels.heads(label)]
    with writing(path, "csv", force=force) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        file.write(f"# {MADE_BY}\n")  # a label file written by hand lacks this line and is not replaced
        file.write(csv_text(rows, ("head", "label")))
