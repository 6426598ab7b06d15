"""A graph of named nodes and keyed edges, as other programs take it: networkx and GraphML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from xml.etree import ElementTree

from headspan.system.outputs import MADE_BY
from headspan.vocabulary.errors import missing_extra

if TYPE_CHECKING:
    import networkx

Fields: TypeAlias = Mapping[str, "str | int | float"]
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}


class Link(NamedTuple):
    """One directed edge; two nodes may have several with different keys."""

    source: str
    target: str
    key: str
    fields: Fields


class Graph(NamedTuple):
    about: Fields
    nodes: Mapping[str, Fields]
    edges: Sequence[Link]


def as_networkx(graph: Graph) -> networkx.MultiDiGraph[str]:
    """A directed multigraph with the fields as attributes.

    All edges have the same attributes: one that an edge does not have is NaN, or "" if it is not a number.
    """
    try:
        import networkx
    except ImportError:
        raise missing_extra("networkx", "graph", "a graph") from None
    made: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    made.graph.update(graph.about)
    for name, fields in graph.nodes.items():
        made.add_node(name, **fields)
    missing = {
        name: math.nan if type(value) in (int, float) else ""
        for _, _, _, fields in graph.edges
        for name, value in fields.items()
    }
    for source, target, key, fields in graph.edges:
        made.add_edge(source, target, key, **{**missing, **fields})
    return made


def as_graphml(graph: Graph) -> str:
    """GraphML text, with every field declared at its head."""
    root = ElementTree.Element("graphml", xmlns="http://graphml.graphdrawing.org/xmlns")
    body = ElementTree.Element("graph", id="wiring", edgedefault="directed")
    declared: set[str] = set()

    def attach(kind: str, element: ElementTree.Element, fields: Fields) -> None:
        for name, value in fields.items():
            key = f"{kind}-{name}"
            if key not in declared:
                declared.add(key)
                about = {"id": key, "for": kind, "attr.name": name, "attr.type": _TYPES[type(value)]}
                ElementTree.SubElement(root, "key", about)
            ElementTree.SubElement(element, "data", key=key).text = _xml_text(_text(value))

    attach("graph", body, graph.about)
    for name, fields in graph.nodes.items():
        attach("node", ElementTree.SubElement(body, "node", id=name), fields)
    for source, target, key, fields in graph.edges:
        ends = {"id": f"{key}-{source}-{target}", "source": source, "target": target}
        attach("edge", ElementTree.SubElement(body, "edge", ends), fields)
    root.append(body)
    ElementTree.indent(root, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<!-- {MADE_BY} -->\n{ElementTree.tostring(root, "unicode")}\n'


def _text(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _xml_text(text: str) -> str:
    """XML has no way to write control characters and lone surrogates: replace them."""
    return _NOT_XML.sub("\ufffd", text)
