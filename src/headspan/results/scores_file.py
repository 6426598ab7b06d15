"""The file of a result: scores and ranks as safetensors arrays, everything else as JSON in its metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from headspan.results.checks import (
    check_annotations,
    check_extra,
    check_heads,
    check_ports,
    check_ranks,
    check_scores,
    damaged,
)
from headspan.results.metadata import ANNOTATIONS, PROVENANCE, RESULT, check_fields
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import NODE_ROLES, ROLES, Head, Node, Pairing, Role, check_node_name
from headspan.vocabulary.ports import PortTable

if TYPE_CHECKING:
    from headspan.results.scores import Scores

# 1: two lists of heads; 2: a list of ports for every role, and arrays besides scores; 3: nodes, each port of them with
# its position; 4: a hash of the content, and the identity of its model with every annotation.
SCHEMA = SEALED_SCHEMA = 4
Facts: TypeAlias = dict[str, Any]
Arrays: TypeAlias = "dict[tuple[str, Pairing], np.ndarray]"
# arrays, ports, d_model, ranks, provenance, annotations, extra: the fields of Scores
Parts: TypeAlias = "tuple[Arrays, PortTable, int, dict[Role, np.ndarray], Facts, Facts, dict[str, np.ndarray]]"


def result_parts(scores: Scores) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata and the arrays of the file."""
    tensors = {f"{metric}/{pairing}": a for (metric, pairing), a in scores.arrays.items()}
    tensors |= {f"rank/{role}": np.asarray(r, dtype=np.int32) for role, r in scores.role_ranks.items()}
    tensors |= scores.extra
    table = scores.ports
    head = {
        "schema": SCHEMA,
        "d_model": scores.d_model,
        "ports": {str(role): [str(port) for port in ports] for role, ports in table.ports.items()},
        "served_by": {str(head): str(kv) for head, kv in table.served_by.items()},
        "nodes": {
            str(role): [[node.name, node.kind, node.layer, node.position] for node in table.of(role)]
            for role in NODE_ROLES
            if table.of(role)
        },
        "extra": list(scores.extra),
        "order": [f"{metric}/{pairing}" for metric, pairing in scores.arrays],  # safetensors sorts by name
        "provenance": scores.provenance,
        "annotations": scores.annotations,
    }
    return head, tensors


def read_result(found: Any, tensors: Mapping[str, np.ndarray], path: Path) -> Parts:
    """The fields of the scores in a file; a newer version or impossible content is refused."""
    head = _checked_head(found, path)
    table = _port_table(head, path)
    arrays: dict[tuple[str, Pairing], np.ndarray] = {}
    ranks: dict[Role, np.ndarray] = {}
    extra = {name: tensors[name] for name in head.get("extra", ()) if name in tensors}
    listed = [name for name in dict.fromkeys(head["order"]) if name in tensors]
    for name in dict.fromkeys([*listed, *(name for name in tensors if name not in extra)]):
        metric, _, rest = name.rpartition("/")
        if metric == "rank":
            role = _role(rest, path)
            ranks[role] = _checked_array(tensors[name], (len(table.of(role)),), np.int32, name, path)
        else:
            pairing = Pairing.parse(rest)
            shape = (len(table.of(pairing.source)), len(table.of(pairing.target)))
            arrays[metric, pairing] = _checked_array(tensors[name], shape, np.float32, name, path)
    provenance, annotations = head["provenance"], head["annotations"]
    check_ranks(ranks, head["d_model"], provenance, path)
    for (metric, pairing), values in arrays.items():
        check_scores(f"{metric[:40]}/{pairing}", values, (metric, pairing), table, ranks, provenance, path)
    check_extra(extra, table, path)
    check_annotations(annotations, table, provenance, path)
    return arrays, table, head["d_model"], ranks, provenance, annotations, extra


def is_result(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """True for a safetensors file that says it is a headspan result (cheap: reads the header only)."""
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path) or not str(path).endswith(".safetensors"):
        return False
    if not os.path.isfile(path):
        return False
    try:
        with safe_open(path, framework="numpy") as file:
            return "headspan" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _checked_head(head: Any, path: Path) -> dict[str, Any]:
    """The JSON metadata of a result file, checked."""
    schema = head.get("schema") if isinstance(head, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise HeadspanError(
            f"{path} was written by a newer headspan (schema {schema}, this one reads {SCHEMA}): upgrade headspan"
        )
    if type(schema) is not int or schema < 1 or not {*RESULT} - {"extra", "hash"} <= {*head}:
        raise HeadspanError(f"{path} is damaged: its headspan metadata is incomplete; make it again")
    check_fields(head, RESULT, "metadata", path)
    check_fields(head["provenance"], PROVENANCE, "provenance", path)
    check_fields(head["annotations"], ANNOTATIONS, "annotation", path)
    return head


def _port_table(head: dict[str, Any], path: Path) -> PortTable:
    """The heads and nodes of a result file, by its schema."""
    try:
        if head["schema"] == 1:
            query, kv = (list(map(Head.parse, head["heads"][key])) for key in ("query", "kv"))
            table = PortTable.of_heads(query, kv)
            check_heads(table.ports, path)
            return table
        listed = head["nodes"]
        if isinstance(listed, list):  # schema 2: one position for both ports
            rows = {row[0]: row for row in listed}
            listed = {str(role): [rows[name] for name in head["ports"].get(role, ())] for role in NODE_ROLES}
        reading, writing = ({row[0] for row in listed.get(str(role), ())} for role in NODE_ROLES)
        ports: dict[Role, tuple[Any, ...]] = {
            Role(role): tuple(
                Node.at(position, layer, check_node_name(name), kind, name in reading, name in writing)
                for name, kind, layer, position in rows
            )
            for role, rows in listed.items()
        }
        ports |= {Role(role): tuple(map(Head.parse, names)) for role, names in head["ports"].items() if role in ROLES}
        served_by = {Head.parse(query): Head.parse(kv) for query, kv in head["served_by"].items()}
    except (HeadspanError, KeyError, TypeError, ValueError, AttributeError):
        raise damaged(path, "its lists of heads are malformed") from None
    check_ports(ports, served_by, path)
    return PortTable({role: ports[role] for role in (*ROLES, *NODE_ROLES) if ports.get(role)}, served_by)


def _role(name: str, path: Path) -> Role:
    if name not in Role.__members__:
        raise HeadspanError(f"{path} is damaged: it has ranks for {name[:80]!r}, which is not a role")
    return Role(name)


def _checked_array(values: np.ndarray, shape: tuple[int, ...], dtype: type, name: str, path: Path) -> np.ndarray:
    """Scores or ranks of a result file; raises if they do not fit its heads."""
    if values.shape != shape:
        raise HeadspanError(f"{path} is damaged: {name} has shape {values.shape}, its heads need {shape}")
    if values.dtype != dtype:
        raise HeadspanError(f"{path} is damaged: {name} holds numbers of the type {values.dtype}")
    if dtype is np.float32:
        # Replace signalling NaNs of a damaged file, which would warn in every later conversion.
        values = np.where(np.isnan(values), np.float32(np.nan), values)
    if np.isinf(values).any() or (dtype is np.int32 and (values < 0).any()):
        raise HeadspanError(f"{path} is damaged: {name} contains values that no result can have")
    return values
