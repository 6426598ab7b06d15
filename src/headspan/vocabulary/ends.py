"""Which ends edges may have: ``from_`` and ``to``, the same words for every table of edges.

A word is a head (``L5H1``), a port of one (``L5H1.K``), a layer (``L5`` or 5), a class of heads of the labels, or a
node. Under GQA a query head reads through the key/value head of its group, and a key/value head writes through the
query heads of its group.

>>> table = PortTable.regular(range(2), 4, 2)
>>> end = given_end("L1H3", table)
>>> sorted(end.ports[Role.Q]), sorted(end.ports[Role.K])
(['L1H3'], ['L1KV1'])
>>> sorted(given_end(["L0", "L1H2.Q"], table).ports[Role.Q])
['L0H0', 'L0H1', 'L0H2', 'L0H3', 'L1H2']
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from headspan.vocabulary.errors import HeadspanError, WrongArgument, inform, quoted
from headspan.vocabulary.heads import Head, HeadOrNode, Node, Pairing, Port, Role, is_head_name
from headspan.vocabulary.ports import PortTable

EndLike: TypeAlias = Head | Node | Port | str | int
EndsLike: TypeAlias = EndLike | Iterable[EndLike]

_MOST = 100_000  # words of one end
_LAYER = re.compile(r"[Ll]?([0-9]{1,6})")


class Classes(Protocol):
    """Classes of heads, such as `headspan.Labels`."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def heads(self, label: str) -> tuple[Head, ...]: ...


@dataclass(frozen=True)
class End:
    """One end of the edges to list.

    text: as it was given. named: the heads and nodes among it, with their role if one was given; heads of a layer or
    class are not named. ports: names of heads and nodes by role.
    """

    text: str
    named: tuple[tuple[HeadOrNode, Role | None], ...]
    ports: dict[Role, frozenset[str]]

    def among(self, heads: Sequence[HeadOrNode], role: Role) -> np.ndarray:
        """True for the heads or nodes of a role that are at this end."""
        chosen = self.ports.get(role, frozenset())
        return np.array([str(head) in chosen for head in heads], dtype=bool)

    def notes(self, table: PortTable) -> Iterator[str]:
        """A note for each query head whose keys and values are those of a shared head."""
        for head, role in self.named:
            asked = Role.K if role is None else role
            if asked.shared and isinstance(head, Head) and not head.kv and (note := table.note(head, asked)):
                yield note


@dataclass(frozen=True)
class Ends:
    """Where edges start and where they end; None for anywhere."""

    start: End | None = None
    stop: End | None = None

    def __bool__(self) -> bool:
        return self.start is not None or self.stop is not None

    def mask(self, pairing: Pairing, sources: Sequence[HeadOrNode], targets: Sequence[HeadOrNode]) -> np.ndarray:
        """True for the pairs with these ends, (sources, targets)."""
        rows = np.ones(len(sources), bool) if self.start is None else self.start.among(sources, pairing.source)
        columns = np.ones(len(targets), bool) if self.stop is None else self.stop.among(targets, pairing.target)
        return rows[:, None] & columns[None, :]

    def check(self, pairings: Iterable[Pairing]) -> None:
        """Refuse an end that none of the pairings can have, such as ``to="L5H1.K"`` where only OQ is listed."""
        listed = list(pairings)
        sides = (
            (self.start, "start at", [p.source for p in listed]),
            (self.stop, "end at", [p.target for p in listed]),
        )
        for end, verb, roles in sides:
            if end is not None and not any(end.ports.get(role) for role in roles):
                possible = ", ".join(dict.fromkeys(map(str, roles)))
                raise HeadspanError(
                    f"{', '.join(map(str, listed))} edges cannot {verb} {quoted(end.text)}, because they {verb} "
                    f"{possible}. Choose another pairing, or leave out the role"
                )

    def names(self) -> dict[str, list[str]]:
        """The ports of each given end, ``from`` and ``to``, by name."""
        sides = (("from", self.start), ("to", self.stop))
        return {
            word: sorted(f"{name}.{role}" for role, names in end.ports.items() for name in names)
            for word, end in sides
            if end is not None
        }

    def __str__(self) -> str:
        """``from L4 to L5H1.K``, for titles."""
        parts = (("from", self.start), ("to", self.stop))
        return " ".join(f"{word} {end.text}" for word, end in parts if end is not None)


def given_ends(from_: EndsLike | None, to: EndsLike | None, table: PortTable, labels: Classes | None = None) -> Ends:
    """The ends that a caller gives, checked against the heads of a model; says where a head stands for a shared one."""
    ends = Ends(*(None if given is None else given_end(given, table, labels) for given in (from_, to)))
    for note in dict.fromkeys(ends.stop.notes(table)) if ends.stop is not None else ():
        inform(note)
    return ends


def given_end(given: EndsLike, table: PortTable, labels: Classes | None = None) -> End:
    """One end; raises for a word that is not a head, a port, a layer, a class or a node of this model."""
    named = list(words(given))
    if not named:
        raise HeadspanError("no end of edges was given. Name a head such as L5H1, or leave it out")
    found = [part for word in named for part in _parts(word, table, labels)]
    ports = {role: frozenset(name for end in found for name in end.ports.get(role, ())) for role in Role}
    return End(", ".join(map(str, named)), tuple(one for end in found for one in end.named), ports)


def acts_as(table: PortTable, head: HeadOrNode, role: Role) -> tuple[HeadOrNode, ...]:
    """The heads that hold this head's weight of a role: itself, its KV head, or the query heads of its group."""
    if isinstance(head, Node):
        return tuple(port for port in table.of(role) if str(port) == head.name)
    if head in table.of(role):
        return (head,)
    if head.kv:
        return table.group_of(head) if not role.shared and head in table.heads else ()
    return (table.kv_of(head),) if role.shared and head in table.served_by else ()


def check_head(table: PortTable, head: HeadOrNode) -> None:
    """Refuse a head that the model does not have."""
    if isinstance(head, Head) and head not in table.heads:
        shared = f", its shared ones from {table.kv[0]} to {table.kv[-1]}" if table.shared else ""
        raise HeadspanError(f"there is no head {head}: the heads go from {table.query[0]} to {table.query[-1]}{shared}")


def in_layer(table: PortTable, layer: int) -> End:
    """All heads and nodes of a layer."""
    ports = {role: frozenset(str(port) for port in table.of(role) if port.layer == layer) for role in Role}
    if not any(ports.values()):
        layers = sorted({head.layer for head in table.query})
        raise HeadspanError(f"there are no heads in layer {layer}: they are in layers {layers[0]} to {layers[-1]}")
    return End(f"layer {layer}", (), ports)


def of_class(table: PortTable, label: str, labels: Classes | None) -> End:
    """The heads of a class."""
    if labels is None:
        raise HeadspanError(f"the class {quoted(label)!r} needs labels: give `labels` as well")
    names = frozenset(map(str, labels.heads(label)))
    return End(label, (), {role: frozenset(str(p) for p in table.of(role) if str(p) in names) for role in Role})


def words(given: EndsLike | None) -> Iterator[EndLike]:
    """The words of one end: none, one or several."""
    if isinstance(given, (str, int, Head, Node, Port)):
        given = [given]
    elif given is None:
        return
    elif isinstance(given, (bytes, bytearray, Mapping, np.ndarray)) or not isinstance(given, Iterable):
        raise WrongArgument(_not_an_end(given))
    for word in itertools.islice(given, _MOST):
        if isinstance(word, np.integer):
            word = int(word)
        if isinstance(word, bool) or not isinstance(word, (str, int, Head, Node, Port)):
            raise WrongArgument(_not_an_end(word))
        yield word


def _not_an_end(given: object) -> str:
    return f"an end of edges is a head, a port, a layer, a class or a node, not {repr(given)[:60]}"


def _parts(word: EndLike, table: PortTable, labels: Classes | None) -> list[End]:
    """What a word means: one end, or one for each part of a list with commas."""
    text = str(word)
    known = labels is not None and text in labels.names
    if isinstance(word, str) and "," in word and not known and not (table.nodes and table.node(word)):
        return [end for part in text.split(",") for end in _parts(part.strip(), table, labels)]
    node = isinstance(word, str) and table.nodes and table.node(word) is not None
    if known and node:
        raise HeadspanError(f"{quoted(text)!r} is a node and a class of the labels. Rename one of them")
    if known:
        return [of_class(table, text, labels)]
    if not node and not isinstance(word, (Head, Node, Port)) and (layer := _LAYER.fullmatch(text.strip())):
        return [in_layer(table, int(layer[1]))]
    if isinstance(word, str) and not is_head_name(text.strip().partition(".")[0]) and not table.nodes:
        classes = f" ({quoted(', '.join(labels.names))})" if labels is not None else ", with `labels`"
        raise HeadspanError(
            f"{quoted(text)!r} names no end of edges. Give a head (L5H1), a port (L5H1.K), a layer (L5) or a class "
            f"of heads{classes}"
        )
    head, role = table.ask(word)  # type: ignore[arg-type]
    check_head(table, head)
    roles = tuple(Role) if role is None else (role,)
    if role is None and head.kv:  # reads keys and values; the queries are those of other heads
        roles = tuple(one for one in Role if one is not Role.Q)
    return [End(text, ((head, role),), {one: frozenset(map(str, acts_as(table, head, one))) for one in roles})]
