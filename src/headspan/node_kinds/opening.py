"""Open the nodes named by a command line or a Python call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.node_kinds.node_sets import GivenNodes, NodeSet, no_layer
from headspan.system.deprecation import warn_renamed
from headspan.vocabulary.errors import HeadspanError, WrongArgument
from headspan.vocabulary.heads import Node

OnePath: TypeAlias = str | os.PathLike[str]
OneNode: TypeAlias = OnePath | Node | NodeSet | Mapping[str, Any]  # a mapping of the arguments of `node_sets`
NodesLike: TypeAlias = OneNode | Iterable[OneNode]

_LISTED = 4096  # names of a set up to this size are compared one by one


_ARGUMENTS = (
    "nodes",
    "sae",
    "adapter",
    "neurons",
    "tokens",
    "embedding",
    "unembedding",
    "components",
)  # of `node_sets`


def node_sets(
    weights: AttentionWeights,
    nodes: NodesLike | None = None,
    sae: OnePath | Iterable[OnePath] | None = None,
    adapter: OnePath | Iterable[OnePath] | None = None,
    neurons: str | Iterable[str] | None = None,
    tokens: str | Iterable[str] | None = None,
    embedding: bool = False,
    unembedding: bool = False,
    components: str | Iterable[str] | None = None,
) -> list[NodeSet]:
    """The nodes that a command line or a Python call names, for a model: a list of sets, their names all different.

    nodes: files (``FILE[:name][@layer]``), nodes made in Python, and mappings of these arguments, such as
    ``{"neurons": "L3:17", "tokens": " Paris"}``, so that one argument ``nodes`` of a function can name any.
    sae: directories of SAELens, ``DIR[:indices]``. adapter: directories of PEFT. neurons: ``L3:17,L3:*``.
    tokens: words with commas between them, or a list.
    embedding, unembedding: all rows. components: of a parameter decomposition, ``FILE[:MODULE[:indices]]``.
    Folded weights give folded nodes.
    """
    from headspan.node_kinds.adapters import adapter_sets
    from headspan.node_kinds.components import component_sets
    from headspan.node_kinds.neurons import neuron_sets
    from headspan.node_kinds.saes import sae_sets
    from headspan.node_kinds.tokens import token_sets

    added = listed(nodes)
    sets: list[NodeSet] = [found for item in added for found in _added(weights, item)]
    floating = [item.name for item in added if isinstance(item, Node) and item.layer is None]
    if floating:
        sets[0].notes.append(no_layer(*floating))
    sets += [found for item in listed(sae) for found in sae_sets(weights, _path(item))]
    sets += [found for item in listed(adapter) for found in adapter_sets(weights, _path(item))]
    sets += neuron_sets(weights, neurons) if neurons is not None else []
    sets += token_sets(weights, tokens, embedding, unembedding)
    sets += [found for item in listed(components) for found in component_sets(weights, _path(item))]
    check_names(sets)
    return sets


def _added(weights: AttentionWeights, item: Any) -> list[NodeSet]:
    from headspan.node_kinds.files import file_sets

    if isinstance(item, NodeSet):
        return [item]
    if isinstance(item, Node):
        return [GivenNodes(weights, item)]
    if isinstance(item, Mapping):
        if "add" in item:
            warn_renamed("nodes={'add': …}", "nodes={'nodes': …}")
            item = {"nodes" if key == "add" else key: value for key, value in item.items()}
        wrong = [key for key in item if key not in _ARGUMENTS]
        if wrong or not item:
            seen = f"has {str(wrong[0])[:40]!r}" if wrong else "is empty"
            raise HeadspanError(f"nodes by kind are a mapping of {', '.join(_ARGUMENTS)}, but this one {seen}")
        return node_sets(weights, **item)
    if isinstance(item, (str, os.PathLike)):
        return file_sets(weights, os.fspath(item))
    raise HeadspanError(f"{repr(item)[:60]} is not a node: give headspan.Node(basis, name, layer) or a file")


def _path(item: Any) -> str:
    if not isinstance(item, (str, os.PathLike)) or not isinstance(os.fspath(item), str):
        raise HeadspanError(f"{repr(item)[:60]} is not the path of a directory")
    return os.fspath(item)


def listed(given: Any) -> list[Any]:
    """One item or several, as a list."""
    if given is None:
        return []
    if isinstance(given, (str, os.PathLike, Node, NodeSet, Mapping)):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, type):
        raise WrongArgument(f"nodes must be a list of files and headspan.Node objects, not {repr(given)[:60]}")
    return list(given)


def check_names(sets: Sequence[NodeSet]) -> None:
    """Refuse two nodes with the same name, ignoring case."""
    small = [found for found in sets if len(found) <= _LISTED]
    large = [found for found in sets if len(found) > _LISTED]
    seen: dict[str, str] = {}
    for found in small:
        for number in found.ids:
            name = found.name(int(number))
            if name.upper() in seen or any(other.find(name) is not None for other in large):
                where = seen.get(name.upper(), "another set")
                if where == found.label:
                    raise HeadspanError(
                        f"{name[:80]} of {where} is given twice: give it once, or a copy under another name"
                    )
                raise HeadspanError(f"two nodes are named {name[:80]} (of {where} and of {found.label}): rename one")
            seen[name.upper()] = found.label
    for i, found in enumerate(large):
        for other in large[:i]:
            if found.stem == other.stem and np.intersect1d(found.ids, other.ids).size:
                raise HeadspanError(
                    f"{found.label} and {other.label} name their nodes the same ({found.stem}…): rename one of them"
                )
