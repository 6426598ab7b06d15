"""Checks of the content of a result file: heads, ranks, scores, pairs, effects and their model.

They run once, when a file is read, so that later code can rely on them. :mod:`headspan.results.metadata` checks
provenance and annotations; the table of similarities has the range of each score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headspan.results.metadata import MODEL
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    FLOW_PAIRINGS,
    NODE_ROLES,
    ROLES,
    Head,
    Node,
    Pairing,
    Role,
    forward_mask,
    pair_mask,
)
from headspan.vocabulary.ports import PortTable

# Tolerance of the range of a score, as a share of its maximum: float32 sums, and products of bfloat16.
SLACK, COARSE_SLACK = 1e-4, 2.0**-7


def damaged(path: Path, what: str) -> HeadspanError:
    """The error for a damaged file."""
    return HeadspanError(f"{path} is damaged: {what}; make it again")


def check_heads(ports: Mapping[Role, Sequence[Any]], path: Path) -> None:
    """Refuse heads in an order, or with numbers, that no model has, since names and scores would not match."""
    for role in ROLES:
        last, counted = -1, {}
        for head in ports[role]:
            if head.layer < last or head.index != counted.get((head.layer, head.kind), 0):
                raise damaged(path, f"its {role} heads are not in order at {head}")
            last = head.layer
            counted[head.layer, head.kind] = head.index + 1
    keys = [head for head in ports[Role.K] if head.kind != "KR"]
    if list(ports[Role.Q]) != list(ports[Role.O]) or keys != list(ports[Role.V]):
        raise damaged(path, "its heads are not the same in Q and O, or in K and V")


def check_ports(ports: Mapping[Role, Sequence[Any]], served_by: Mapping[Head, Head], path: Path) -> None:
    """Refuse lists of heads and nodes that no model has: not all roles, names twice, nodes that are not in order."""
    sound = (
        set(ROLES) <= set(ports) <= {*ROLES, *NODE_ROLES}
        and all(isinstance(head, Head) for role in ROLES for head in ports[role])
        and all(_is_node(node) for role in NODE_ROLES for node in ports.get(role, ()))
        and all(_in_order(ports.get(role, ())) for role in NODE_ROLES)
        and {*served_by} <= {*ports[Role.Q]}
        and {*served_by.values()} <= {*ports[Role.K]}
    )
    if not sound or any(len(set(map(str, names))) != len(names) for names in ports.values()):
        raise damaged(path, "its lists of heads are malformed")
    check_heads(ports, path)


def _is_node(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    numbers = all(type(number) is int and abs(number) < 2**62 for number in (node.position, node.layer))
    return numbers and isinstance(node.kind, str) and node.kind.isprintable() and len(node.kind) < 100


def _in_order(nodes: Sequence[Node]) -> bool:
    """Whether nodes are in stream order, as in a result."""
    places = [(node.position, node.layer) for node in nodes]
    return places == sorted(places)


def check_ranks(ranks: Mapping[Role, np.ndarray], d_model: int, provenance: Mapping[str, Any], path: Path) -> None:
    """Refuse subspaces of more dimensions than their heads or the stream have."""
    widths = provenance.get("d_head") or {}
    for role, found in ranks.items():
        most = min(d_model, widths.get(str(role), d_model))
        if (found > most).any():
            raise damaged(path, f"it has subspaces of {found.max()} dimensions for {role}, more than {most}")


def check_scores(
    name: str,
    values: np.ndarray,
    key: tuple[str, Pairing],
    ports: PortTable,
    ranks: Mapping[Role, np.ndarray],
    sizes: Mapping[tuple[str, Role], np.ndarray],
    provenance: Mapping[str, Any],
    path: Path,
) -> None:
    """Refuse scores outside the range of their similarity, and scores of pairs that were not compared."""
    from headspan.subspaces.metrics import metric_of

    metric, pairing = key
    if not set(pairing) <= set(ranks):
        raise damaged(path, f"it has {name} without the ranks of its heads")
    slack = COARSE_SLACK if provenance.get("products") == "bfloat16" else SLACK
    products = pair_sizes(sizes, metric, pairing)
    if metric_of(metric).observed and products is None:
        raise damaged(path, f"it has {name} without the sizes of its heads")
    low, high = metric_of(metric).bounds(ranks[pairing.source][:, None], ranks[pairing.target][None, :], products)
    room = slack * np.maximum(np.minimum(high, np.inf), 1.0)
    with np.errstate(invalid="ignore"):
        outside = (values < low - room) | (values > high + room)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        source, target = ports.of(pairing.source)[row], ports.of(pairing.target)[column]
        raise damaged(
            path, f"{name} of {source} and {target} is {values[row, column]:g}, outside the range of {metric[:40]}"
        )
    pairs = provenance.get("pairs")
    if pairs is None:
        return
    compared = pair_mask(pairing, ports.of(pairing.source), ports.of(pairing.target), pairs)
    if (~np.isnan(values) & ~compared).any():
        raise damaged(path, f"{name} has scores of pairs that are not among its pairs ({pairs})")


def pair_sizes(sizes: Mapping[tuple[str, Role], np.ndarray], metric: str, pairing: Pairing) -> np.ndarray | None:
    """Products of the sizes of both ends of every pair, for a similarity that has sizes."""
    first, second = (sizes.get((metric, role)) for role in pairing)
    return None if first is None or second is None else np.outer(first, second)


def effect_shape(name: str, ports: PortTable) -> tuple[int, ...]:
    """The shape of an array of effects by its name; raises if the name does not describe edges of a circuit."""
    _, _, rest = name.partition("/")
    measure, _, last = rest.partition("/")
    heads = len(ports.of(Role.O))
    if measure in ("clean", "write_norms"):
        return (heads,)
    pairing = Pairing.parse(last)
    if pairing not in FLOW_PAIRINGS:
        raise HeadspanError(f"the result is damaged: it has effects of {pairing}, which is not an edge of a circuit")
    return heads, len(ports.of(pairing.target))


def is_effect(name: str) -> bool:
    """Whether an array beside the scores holds effects."""
    return name.partition("/")[0] == "effect"


def check_extra(extra: Mapping[str, np.ndarray], ports: PortTable, path: Path) -> None:
    """Refuse effects with the wrong shape, infinite effects, and effects of impossible edges."""
    for name, values in extra.items():
        if not is_effect(name):
            continue
        shape = effect_shape(name, ports)
        if values.shape != shape or values.dtype.kind != "f":
            raise damaged(path, f"{name[:80]} has shape {values.shape}, its heads need {shape}")
        if np.isinf(values).any():
            raise damaged(path, f"{name[:80]} contains infinite numbers")
        if len(shape) == 2:
            pairing = Pairing.parse(name.rpartition("/")[2])
            forward = forward_mask(ports.of(pairing.source), ports.of(pairing.target))
            if (~np.isnan(values) & ~forward).any():
                raise damaged(path, f"{name[:80]} has effects on heads that come earlier")


def check_annotations(
    annotations: Mapping[str, Any], ports: PortTable, provenance: Mapping[str, Any], path: Path
) -> None:
    """Refuse head scores and effects of another model, and head scores of unknown heads."""
    from headspan.results.identity import same_model

    behaviour, effects = annotations.get("behaviour") or {}, annotations.get("effects") or {}
    for what, model in (("its head scores", behaviour.get(MODEL)), ("its effects", effects.get("model"))):
        if model:
            same_model(provenance, model, str(path), what)
    known = {str(head) for head in ports.query}
    named = {name for kind, scores in behaviour.items() if kind != MODEL for name in scores}
    if unknown := {name for name in named if str(Head.parse(name)) not in known}:
        raise damaged(path, f"it has head scores of {min(unknown)}, which is not one of its heads")
