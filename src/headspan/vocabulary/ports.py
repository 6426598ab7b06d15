"""Which ports a model has: for every role its heads or nodes in order, and whose keys and values a head uses.

>>> table = PortTable.regular(range(2), n_heads=4, n_kv_heads=2)
>>> [str(head) for head in table.of("K")]
['L0KV0', 'L0KV1', 'L1KV0', 'L1KV1']
>>> str(table.resolve("L1H3", "K"))
'L1KV1'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from headspan.vocabulary.errors import HeadspanError, WrongArgument
from headspan.vocabulary.heads import NODE_ROLES, ROLES, Head, HeadOrNode, Node, Port, Role, is_head_name


@dataclass(frozen=True)
class PortTable:
    """What reads and writes the stream: for every role the heads or nodes that have a port with it, in stream order.

    With shared key/value heads (GQA, MQA) a KV head is listed once, not once per query head. ``served_by`` then gives
    the KV head of every query head, which may be in an earlier layer.
    """

    ports: Mapping[Role, tuple[HeadOrNode, ...]]
    served_by: Mapping[Head, Head] = field(default_factory=dict[Head, Head])

    @classmethod
    def regular(cls, layers: Iterable[int], n_heads: int, n_kv_heads: int) -> PortTable:
        """Every layer with the same numbers of query and key/value heads.

        >>> table = PortTable.regular(range(2), 6, 2)
        >>> str(table.kv_of("L1H4")), [str(head) for head in table.group_of("L1KV1")]
        ('L1KV1', ['L1H3', 'L1H4', 'L1H5'])
        """
        return cls.of_counts(dict.fromkeys(layers, (n_heads, n_kv_heads)))

    @classmethod
    def of_counts(
        cls, counts: Mapping[int, tuple[int, int]], kv_layers: Mapping[int, int] = MappingProxyType({})
    ) -> PortTable:
        """Every layer with its own numbers of query and of key/value heads; kv_layers as in :meth:`of_heads`.

        >>> table = PortTable.of_counts({0: (4, 2), 3: (2, 2), 4: (4, 0)}, {4: 0})
        >>> [str(head) for head in table.of("K")], str(table.kv_of("L4H3"))
        (['L0KV0', 'L0KV1', 'L3H0', 'L3H1'], 'L0KV1')
        """
        lent = set(kv_layers.values())
        return cls.of_heads(
            tuple(Head(layer, i) for layer, (n_heads, _) in counts.items() for i in range(n_heads)),
            tuple(
                Head(layer, i, "KV" if n_kv_heads < n_heads or layer in lent else "H")
                for layer, (n_heads, n_kv_heads) in counts.items()
                for i in range(n_kv_heads)
            ),
            kv_layers,
        )

    @classmethod
    def of_heads(
        cls, query: Sequence[Head], kv: Sequence[Head], kv_layers: Mapping[int, int] = MappingProxyType({})
    ) -> PortTable:
        """Q and O of the query heads, K and V of the others; the query heads of a layer share its KV heads evenly.

        kv_layers: of layers without keys and values, the earlier layer whose KV heads they share.
        """
        query, kv = tuple(query), tuple(kv)
        shared: dict[int, list[Head]] = {}
        counts: dict[int, int] = {}
        for head in kv:
            if head.kv:
                shared.setdefault(head.layer, []).append(head)
        for head in query:
            counts[head.layer] = counts.get(head.layer, 0) + 1
        served_by = {
            head: pool[head.index * len(pool) // counts[head.layer]]
            for head in query
            if (pool := shared.get(kv_layers.get(head.layer, head.layer))) and head.index < counts[head.layer]
        }
        return cls({role: kv if role.shared else query for role in ROLES}, served_by)

    @property
    def query(self) -> tuple[Head, ...]:
        """The heads that have a Q and an O."""
        return self.of(Role.O)

    @property
    def kv(self) -> tuple[Head, ...]:
        """The heads that have a V: the query heads themselves, or those that groups of them share."""
        return self.of(Role.V)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Every head once: query heads, then shared ones."""
        return tuple(dict.fromkeys(h for role in (Role.O, Role.V, Role.K) for h in self.of(role)))

    def a_layer(self, role: Role | str) -> str:
        """How many heads of a role a layer has, in words.

        >>> PortTable.of_counts({0: (4, 2), 1: (6, 2)}).a_layer("O")
        '4 to 6'
        """
        counts = {head.layer: 0 for head in self.of(role)}
        for head in self.of(role):
            counts[head.layer] += 1
        least, most = min(counts.values(), default=0), max(counts.values(), default=0)
        return f"{most}" if least == most else f"{least} to {most}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes that are not heads, each once."""
        return tuple(dict.fromkeys(node for role in (Role.W, Role.R) for node in self.of(role)))

    @property
    def shared(self) -> bool:
        """True where query heads share their keys and values."""
        return bool(self.served_by)

    @property
    def one_layer(self) -> str | None:
        """Why a model with one attention layer has no pairs of OQ, OK and OV; None for other models."""
        if len({head.layer for head in self.query}) != 1:
            return None
        return "this model has one attention layer, so no head reads what another one writes"

    def same_heads(self, other: PortTable) -> bool:
        """Whether two tables have the same heads; other nodes are ignored."""
        same = isinstance(other, PortTable) and self.served_by == other.served_by
        return same and all(self.of(role) == other.of(role) for role in ROLES)

    def of(self, role: Role | str) -> tuple[Any, ...]:
        """The heads of a role (of R and W: the nodes), in the order of the stream."""
        return self.ports.get(Role.parse(role), ())

    def span(self, role: Role | str, layer: int) -> slice:
        """The slice of a role's list that holds the heads or nodes of one layer."""
        try:
            return self._spans[role].get(layer, slice(0, 0))  # type: ignore[index]
        except (KeyError, TypeError):  # a role by its letter, or one that nothing in this table has
            if not isinstance(layer, int):
                raise WrongArgument(f"a layer is a whole number, not {str(layer)[:80]!r}") from None
            return self._spans.get(Role.parse(role), {}).get(layer, slice(0, 0))

    @cached_property
    def _spans(self) -> dict[Role, dict[int, slice]]:
        spans: dict[Role, dict[int, slice]] = {}
        for role, ports in self.ports.items():
            spans[role] = {}
            for i, port in enumerate(ports):
                start = spans[role].get(port.layer, slice(i, i)).start
                spans[role][port.layer] = slice(start, i + 1)
        return spans

    @cached_property
    def _places(self) -> dict[Role, dict[str, int]]:
        return {role: {str(port): i for i, port in enumerate(ports)} for role, ports in self.ports.items()}

    @cached_property
    def _spellings(self) -> dict[Role, dict[str, list[str]]]:
        """The names of a role in upper case and without surrounding spaces."""
        found: dict[Role, dict[str, list[str]]] = {}
        for role, names in self._places.items():
            for name in names:
                found.setdefault(role, {}).setdefault(_letters(name), []).append(name)
        return found

    def kv_of(self, head: Head | str) -> Head:
        """The head whose keys and values a query head reads through: itself where nothing is shared."""
        head = Head.parse(head)
        return self.served_by.get(head, head)

    def group_of(self, head: Head | str) -> tuple[Head, ...]:
        """The query heads that a key/value head serves: itself where nothing is shared."""
        head = Head.parse(head)
        if head.kind == "KR":
            return tuple(self.query[self.span(Role.O, head.layer)])
        return tuple(query for query, kv in self.served_by.items() if kv == head) or (head,)

    def find(self, name: HeadOrNode | str, role: Role | str) -> int:
        """The place of a head or node in the list of a role; a query head's K and V are those of its KV head.

        Case is ignored unless two names differ only in case.
        """
        role = Role.parse(role)
        places = self._places.get(role, {})
        text = str(name) if isinstance(name, (str, Head, Node)) else ""
        if text in places:
            return places[text]
        alike = self._spellings.get(role, {}).get(_letters(text), [])
        if len(alike) == 1:
            return places[alike[0]]
        if alike:
            raise HeadspanError(f"{text[:80]!r} may mean {' or '.join(map(repr, alike[:5]))}: give the exact name")
        is_head = is_head_name(text)
        if not self.nodes or is_head or not text.strip():
            head = Head.parse(name)  # type: ignore[arg-type]
            if role.shared and head in self.served_by:
                return places[str(self.served_by[head])]
        ports = self.of(role)
        if not ports:
            raise HeadspanError(f"no head or node has the role {role}: the roles are {', '.join(map(str, self.ports))}")
        what = "head" if is_head else "node"
        raise HeadspanError(
            f"there is no {what} {str(name)[:80]} with the role {role}: these go from {ports[0]} to {ports[-1]}"
        )

    def node(self, name: HeadOrNode | str) -> Node | None:
        """The node with that name, whatever its roles, or None."""
        by_name = {node.name: node for node in self.nodes}
        if str(name) in by_name:
            return by_name[str(name)]
        alike = [other for other in by_name if _letters(other) == _letters(str(name))]
        if len(alike) > 1:
            names = " or ".join(map(repr, alike[:5]))
            raise HeadspanError(f"{str(name)[:80]!r} may mean {names}: give the exact name")
        return by_name[alike[0]] if alike else None

    def ask(self, name: HeadOrNode | Port | str) -> tuple[HeadOrNode, Role | None]:
        """The head or node with a name, and the role if the name has one: ``L5H1``, ``L5H1.K``, ``refusal.R``.

        Nodes are tried first, because their names may contain dots. Whether a head exists is not checked here.
        """
        if isinstance(name, Port):
            return name
        found = self.node(name) if self.nodes and isinstance(name, (str, Node)) else None
        if found is not None or isinstance(name, Head):
            return found or name, None  # type: ignore[return-value]
        start, dot, role = str(name).rpartition(".")
        found = self.node(start) if dot and self.nodes else None
        if found is not None and role.strip().upper() in map(str, NODE_ROLES):
            return found, Role.parse(role)
        if not self.nodes or is_head_name(start if dot else str(name)):
            return Port.parse(name) if dot else (Head.parse(name), None)  # type: ignore[arg-type]
        if found is not None:
            raise HeadspanError(
                f"{found} is a node: it reads as {found}.R or writes as {found}.W, and has no {role[:20]}"
            )
        names = list(dict.fromkeys(node.name for node in self.nodes))
        raise HeadspanError(
            f"there is no head or node {str(name)[:80]!r}: heads are written like L4H7, and the nodes are "
            f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        )

    def resolve(self, name: HeadOrNode | str, role: Role | str) -> Any:
        """The head or node of a role that a name refers to, as in :meth:`find`."""
        return self.of(role)[self.find(name, role)]

    def note(self, name: HeadOrNode | str, role: Role | str) -> str | None:
        """A note where a name refers to the KV head of a query head, or None.

        >>> PortTable.regular(range(2), 6, 2).note("L1H4", "K")
        'L1H4 shares its keys and values: L1H4.K is L1KV1.K, which serves L1H3, L1H4, L1H5'
        """
        found = self.resolve(name, role)
        if not isinstance(found, Head) or not found.kv or str(found) == str(name).strip().upper():
            return None
        asked = Head.parse(name)  # type: ignore[arg-type]
        group = ", ".join(map(str, self.group_of(found)))
        return f"{asked} shares its keys and values: {asked}.{Role(role)} is {found}.{Role(role)}, which serves {group}"


def _letters(name: str) -> str:
    return name.strip().upper()


def shape_text(ports: PortTable, d_model: int) -> str:
    """The shape of a model or result in words: heads and width."""
    query, kv = len(ports.query), len(ports.kv)
    heads = f"{query} heads" if query == kv else f"{query} query and {kv} key/value heads"
    return f"{heads}, d_model {d_model}"
