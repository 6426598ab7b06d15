"""The file of a result: scores and ranks as safetensors arrays, everything else as JSON in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from headspan.errors import HeadspanError
from headspan.heads import NODE_ROLES, ROLES, Head, Node, Pairing, Role, check_node_name
from headspan.port_table import PortTable
from headspan.system.atomic import write_safetensors
from headspan.system.memory import check_room
from headspan.system.outputs import check_output, remember_input

if TYPE_CHECKING:
    from headspan.scores import Scores

# 1: two lists of heads; 2: a list of ports for every role, and arrays besides scores; 3: nodes, each port of them with
# its position. Where there are none the file is one of schema 2, which older versions read.
SCHEMA = 3
Arrays: TypeAlias = "dict[tuple[str, Pairing], np.ndarray]"
# arrays, ports, d_model, ranks, provenance, annotations, extra: what a Scores is made of
Parts: TypeAlias = "tuple[Arrays, PortTable, int, dict[Role, np.ndarray], dict, dict, dict[str, np.ndarray]]"


def write_result(path: str | os.PathLike[str], scores: Scores, force: bool) -> None:
    """Write everything to one file, if it may be written there; it appears only when complete."""
    target = check_output(path, "result", inputs=[scores.provenance.get("reference")], force=force)
    tensors = {f"{metric}/{pairing}": a for (metric, pairing), a in scores.arrays.items()}
    tensors |= {f"rank/{role}": np.asarray(r, dtype=np.int32) for role, r in scores.role_ranks.items()}
    tensors |= scores.extra
    table = scores.ports
    head = {
        "schema": SCHEMA if table.nodes else 2,
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
    write_safetensors(target, tensors, {"headspan": json.dumps(head)})


def read_result(path: Path) -> Parts:
    """What a result file holds; a file from a newer version or of another kind is refused."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        name = path if path.suffix == ".safetensors" else f"{path}.safetensors"
        raise HeadspanError(f"there is no result file {path}: make one with headspan score MODEL --out {name}")
    remember_input(path)
    check_room(f"reading {path}", path.stat().st_size)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if "headspan" not in metadata:
                raise HeadspanError(
                    f"{path} is a safetensors file but not a headspan result: make one with headspan score"
                )
            head = _checked_head(metadata["headspan"], path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise HeadspanError(f"{path} cannot be read as a headspan result ({reason}): make it again") from error
    return _parts(head, tensors, path)


def _parts(head: dict[str, Any], tensors: Mapping[str, np.ndarray], path: Path) -> Parts:
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
    return arrays, table, head["d_model"], ranks, head["provenance"], head["annotations"], extra


def is_result(path: str | os.PathLike[str]) -> bool:
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


def _checked_head(text: str, path: Path) -> dict[str, Any]:
    """The JSON metadata of a result file, or one sentence on what is wrong with it."""
    head = json.loads(text)
    schema = head.get("schema") if isinstance(head, dict) else None
    if isinstance(head, dict) and head.get("kind") in ("diff", "series"):
        what, page = {
            "diff": ("two models compared", "headspan diff BASE OTHER --out page.html"),
            "series": ("a training run", f"headspan track {path} --out page.html"),
        }[head["kind"]]
        raise HeadspanError(
            f"{path} holds {what}, not the scores of one model: make those with headspan score, or see it with {page}"
        )
    if isinstance(schema, int) and schema > SCHEMA:
        raise HeadspanError(
            f"{path} was written by a newer headspan (schema {schema}, this one reads {SCHEMA}): upgrade headspan"
        )
    sound = (
        schema in range(1, SCHEMA + 1)
        and type(head.get("d_model")) is int
        and head["d_model"] >= 1
        and isinstance(head.get("order"), list)
        and isinstance(head.get("extra", []), list)
        and all(isinstance(name, str) for name in (*head["order"], *head.get("extra", ())))
        and all(isinstance(head.get(k), dict) for k in ("provenance", "annotations"))
    )
    if not sound:
        raise HeadspanError(f"{path} is damaged: its headspan metadata lacks what a result must have; make it again")
    return head


def _port_table(head: dict[str, Any], path: Path) -> PortTable:
    """The heads and nodes that a result file lists, in the way of its schema."""
    damaged = HeadspanError(f"{path} is damaged: its lists of heads are not such lists; make it again")
    try:
        if head["schema"] == 1:
            query, kv = (list(map(Head.parse, head["heads"][key])) for key in ("query", "kv"))
            return PortTable.of_heads(query, kv)
        listed = head["nodes"]
        if isinstance(listed, list):  # schema 2: one position for both ports
            rows = {row[0]: row for row in listed}
            listed = {str(role): [rows[name] for name in head["ports"].get(role, ())] for role in NODE_ROLES}
        ports: dict[Role, tuple[Any, ...]] = {
            Role(role): tuple(
                Node(position, layer, check_node_name(name), kind) for name, kind, layer, position in rows
            )
            for role, rows in listed.items()
        }
        ports |= {Role(role): tuple(map(Head.parse, names)) for role, names in head["ports"].items() if role in ROLES}
        served_by = {Head.parse(query): Head.parse(kv) for query, kv in head["served_by"].items()}
    except (HeadspanError, KeyError, TypeError, ValueError, AttributeError):
        raise damaged from None
    sound = (
        set(ROLES) <= set(ports) <= {*ROLES, *NODE_ROLES}
        and all(_is_node(node) for role in NODE_ROLES for node in ports.get(role, ()))
        and all(_in_order(ports.get(role, ())) for role in NODE_ROLES)
        and {*served_by} <= {*ports[Role.Q]}
        and {*served_by.values()} <= {*ports[Role.K]}
    )
    if not sound or any(len(set(map(str, names))) != len(names) for names in ports.values()):
        raise damaged
    return PortTable({role: ports[role] for role in (*ROLES, *NODE_ROLES) if ports.get(role)}, served_by)


def _is_node(node: Node) -> bool:
    numbers = all(type(number) is int and abs(number) < 2**62 for number in (node.position, node.layer))
    return numbers and isinstance(node.kind, str) and node.kind.isprintable() and len(node.kind) < 100


def _in_order(nodes: Sequence[Node]) -> bool:
    """Whether nodes stand in the order of the stream, as those of a result do."""
    places = [(node.position, node.layer) for node in nodes]
    return places == sorted(places)


def _role(name: str, path: Path) -> Role:
    if name not in Role.__members__:
        raise HeadspanError(f"{path} is damaged: it has ranks for {name[:80]!r}, which is not a role")
    return Role(name)


def _checked_array(values: np.ndarray, shape: tuple[int, ...], dtype: type, name: str, path: Path) -> np.ndarray:
    """Scores or ranks of a result file, or one sentence on why they cannot be those of its heads."""
    if values.shape != shape:
        raise HeadspanError(f"{path} is damaged: {name} has shape {values.shape}, its heads need {shape}")
    if values.dtype != dtype:
        raise HeadspanError(f"{path} is damaged: {name} holds numbers of the type {values.dtype}")
    if dtype is np.float32:
        # One kind of NaN: a damaged file may hold signalling ones, which warn in every later conversion.
        values = np.where(np.isnan(values), np.float32(np.nan), values)
    if np.isinf(values).any() or (dtype is np.int32 and (values < 0).any()):
        raise HeadspanError(f"{path} is damaged: {name} holds numbers that no result has")
    return values
