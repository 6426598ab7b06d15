"""Attribution graphs of circuit-tracer and Neuronpedia: JSON with nodes, links between them and what they were made of.

A node of a transcoder has the id ``layer_feature_position``; ``feature`` itself is written in several ways (with an
offset per layer, or paired with the layer), so only the id is read. Other nodes are embeddings, logits and
reconstruction errors. A link has the ids of two nodes and a weight. The file is not trusted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headspan.checkpoints.untrusted import JSON_LIMIT, read_json
from headspan.system.inputs import mode_of
from headspan.vocabulary.errors import HeadspanError, quoted

_ID = re.compile(r"([0-9]{1,6})_([0-9]{1,9})_([0-9]{1,7})")
_NAME = re.compile(r"L([0-9]{1,6})F([0-9]{1,9})(?:@([0-9]{1,7}))?", re.IGNORECASE)
_LARGEST = 1e300  # of weights
_OTHERS = ("embedding", "logit", "error")  # in the types of nodes that are not features of a transcoder


class FeatureAt(NamedTuple):
    """A feature of a transcoder at one token of the prompt."""

    layer: int
    feature: int
    position: int

    def __str__(self) -> str:
        return f"L{self.layer}F{self.feature}@{self.position}"

    @property
    def id(self) -> str:
        return "_".join(map(str, self))

    def named(self, name: str) -> bool:
        """Whether a name means this node: its id, ``L3F17@5``, or ``L3F17`` at any token.

        >>> node = FeatureAt(3, 17, 5)
        >>> [node.named(name) for name in ("3_17_5", "L3F17@5", "l3f17", "L3F18")]
        [True, True, True, False]
        """
        match = _NAME.fullmatch(name.strip())
        if match is None:
            return name.strip() == self.id
        return (int(match[1]), int(match[2])) == self[:2] and match[3] in (None, str(self.position))


class FeatureLink(NamedTuple):
    """What one feature contributes to another, by the graph."""

    source: FeatureAt
    target: FeatureAt
    weight: float


class AttributionGraph(NamedTuple):
    """links: those between features of transcoders, largest weight first; left_out: how many others there are."""

    name: str
    model: str
    links: list[FeatureLink]
    left_out: int


def read_attribution_graph(path: str | os.PathLike[str]) -> AttributionGraph:
    """Read a graph, with every part checked."""
    where = Path(path)
    if mode_of(where) is None:
        raise HeadspanError(f"there is no file {quoted(where)}. Give the JSON of an attribution graph")
    content = read_json(where, JSON_LIMIT)
    nodes, links, about = (content.get(key) for key in ("nodes", "links", "metadata"))
    if not isinstance(nodes, list) or not isinstance(links, list) or not isinstance(about, Mapping):
        raise HeadspanError(
            f"{quoted(where)} is not an attribution graph: it needs nodes, links and metadata, as circuit-tracer and "
            "Neuronpedia write them"
        )
    known: dict[str, FeatureAt | None] = {}
    for number, node in enumerate(nodes, start=1):
        identity, feature = _node(node, f"node {number} of {quoted(where)}")
        # circuit-tracer gives the errors of a layer the ids of features of layer 0: such an id says nothing.
        known[identity] = feature if identity not in known else None
    found = [_link(link, known, f"link {number} of {quoted(where)}") for number, link in enumerate(links, start=1)]
    between = [link for link in found if link is not None]
    between.sort(key=lambda link: -abs(link.weight))
    name, model = (str(about.get(key, ""))[:200] for key in ("slug", "scan"))
    return AttributionGraph(name, model, between, len(found) - len(between))


def _node(node: Any, where: str) -> tuple[str, FeatureAt | None]:
    facts = node if isinstance(node, Mapping) else {}
    identity, kind, layer, position = (facts.get(key) for key in ("node_id", "feature_type", "layer", "ctx_idx"))
    if not isinstance(identity, str) or not isinstance(kind, str):
        raise HeadspanError(f"{where} must have a node_id and a feature_type")
    if "transcoder" not in kind or any(other in kind for other in _OTHERS):
        return identity, None
    match = _ID.fullmatch(identity)
    if match is None or str(layer) != match[1] or str(position) != match[3]:
        raise HeadspanError(
            f"{where} is a feature of a transcoder in layer {str(layer)[:20]} at token {str(position)[:20]}, so its "
            f"id must be layer_feature_position, not {quoted(identity, 40)}"
        )
    return identity, FeatureAt(*map(int, match.groups()))


def _link(link: Any, known: Mapping[str, FeatureAt | None], where: str) -> FeatureLink | None:
    facts = link if isinstance(link, Mapping) else {}
    ends = [facts.get(key) for key in ("source", "target")]
    weight = facts.get("weight")
    if not all(isinstance(end, str) and end in known for end in ends):
        raise HeadspanError(f"{where} must have the ids of two nodes as source and target")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) < _LARGEST:
        raise HeadspanError(f"{where} must have a finite weight")
    source, target = (known[str(end)] for end in ends)
    if source is None or target is None:
        return None
    if source.layer >= target.layer or source.position > target.position:
        raise HeadspanError(f"{where} goes from {source} to {target}, which is not later. Make the graph again")
    return FeatureLink(source, target, float(weight))
