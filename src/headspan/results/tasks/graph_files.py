"""Graph files of EAP-IG, which the MIB benchmark also reads: circuits of a whole model as ``.json`` or ``.pt``.

Such a file gives every edge a score and says whether it is in the circuit. Its names are ``input``, ``a0.h3``, ``m0``
and ``logits``, and an edge is ``a0.h3->a1.h0<q>``. K and V exist there for every query head, also where heads share
them. The attribution of a shared port is the sum over its heads, because to first order the effect of exchanging all
copies is the sum of their effects. So a shared edge is written in equal parts and read as the sum of its parts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headspan.results.tasks.circuit import Circuit
from headspan.results.tasks.edge_table import EdgeTable, mlp_node
from headspan.results.tasks.graph_names import PARALLEL, Layout
from headspan.system.inputs import input_file, mode_of, read_text, reason
from headspan.system.outputs import GENERATOR, writing
from headspan.system.torch_pickle import load_plain
from headspan.vocabulary.errors import HeadspanError, missing_extra, warn
from headspan.vocabulary.heads import Role
from headspan.vocabulary.ports import PortTable
from headspan.vocabulary.words import counted

SUFFIXES = (".json", ".pt")
_WHAT = "graph file"
_ROOM, _PER_EDGE = 4 * 2**20, 300  # bytes of a file: a fixed part, and for each cell of the matrix of edges
_BEGINNING = 4096  # bytes that show what a file is
_LARGEST = 1e300  # of scores
_NEURONS = ("neurons", "neurons_scores", "neurons_in_graph")


def write_graph(
    path: str | os.PathLike[str],
    table: EdgeTable,
    values: np.ndarray,
    kept: np.ndarray | None = None,
    *,
    d_model: int,
    force: bool = False,
) -> None:
    """Write the edges of a model as a graph file, ``.json`` or ``.pt``; it appears only when complete.

    values, kept: (writers, readers) as in the table. Without ``kept`` no edge is in the circuit; EAP-IG and MIB then
    choose the edges by their scores.
    """
    suffix, layout = graph_kind(path), Layout.of(table)
    scores = np.where(layout.mask, values[:, layout.columns] / layout.copies, 0.0)
    if not (np.abs(scores) < np.finfo(np.float32).max).all():
        raise HeadspanError("a graph file holds finite numbers, and some values of these edges are not")
    inside = np.zeros_like(layout.mask) if kept is None else kept[:, layout.columns] & layout.mask
    about = {"generator": GENERATOR, "cfg": {**layout.config, "d_model": int(d_model)}}
    nodes = _nodes_inside(layout, inside)
    with writing(path, suffix, force=force) as temporary:
        if suffix == "json":
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(_json_parts(layout, about, nodes, scores, inside))
        else:
            _save_pt(temporary, layout, about, nodes, scores, inside)


def read_graph(path: str | os.PathLike[str], table: EdgeTable) -> tuple[np.ndarray, np.ndarray]:
    """The values of all edges and which are in the circuit, (writers, readers), from a graph file of this model.

    The file need not be trusted. A shared K or V has the sum of the values of its copies (see the head of this module),
    and is in the circuit if any copy is. Edges that the file leaves out have the value 0.
    """
    layout = Layout.of(table)
    return _values(_content(path, layout), path, layout)


def _content(path: str | os.PathLike[str], layout: Layout) -> Any:
    """What a graph file holds, not checked yet."""
    missing = f"there is no file {path}. Write one with to_json or to_pt of a graph of EAP-IG"
    if graph_kind(path) == "json":
        return _read_json(path, missing, layout)
    return _read_pt(input_file(path, missing), layout)


def _values(content: Any, path: str | os.PathLike[str], layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """The values of all edges and which are in the circuit, (writers, readers), from the content of a graph file."""
    scores, inside = (_of_json if graph_kind(path) == "json" else _of_pt)(content, Path(path), layout)
    if not np.isfinite(scores[layout.mask]).all():
        raise HeadspanError(f"{path} has scores of edges that are not finite numbers: make it again")
    count = layout.merged(inside.astype(np.int64))
    differ = int(((count > 0) & (count < np.bincount(layout.columns))).sum())
    if differ:
        them = f"{counted(differ, 'edge')} to shared keys or values"
        warn(f"the circuit of {path} has {them} for some query heads only. Kept for all query heads")
    return layout.merged(scores), count > 0


def given_edges(circuit: Circuit | str | os.PathLike[str], table: EdgeTable) -> np.ndarray:
    """The edges of a circuit: given, or in a file of headspan, EAP-IG or MIB, (writers, readers)."""
    if isinstance(circuit, Circuit):
        return circuit.kept(table)
    if not is_graph(circuit):
        return Circuit.load(circuit).kept(table)
    return _some(read_graph(circuit, table)[1], circuit)


def graph_circuit(path: str | os.PathLike[str], ports: PortTable) -> Circuit:
    """The circuit in a graph file of EAP-IG or MIB, for a model with these heads."""
    layers = range(1 + max((head.layer for head in ports.of(Role.O)), default=-1))
    tables = [EdgeTable.of(ports, [mlp_node(n, parallel=parallel) for n in layers]) for parallel in (False, True)]
    content = _content(path, Layout.of(tables[0]))
    config = content.get("cfg") if isinstance(content, Mapping) else None
    table = tables[isinstance(config, Mapping) and config.get(PARALLEL) is True]
    values, kept = _values(content, path, Layout.of(table))
    return Circuit.of_table(table, values, _some(kept, path), Path(path).stem, "")


def _some(kept: np.ndarray, path: str | os.PathLike[str]) -> np.ndarray:
    if not kept.any():
        raise HeadspanError(f"{path} has no edges in its circuit. Choose some with EAP-IG, or give another file")
    return kept


def is_graph(circuit: Circuit | str | os.PathLike[str]) -> bool:
    """Whether a file is a graph of EAP-IG: it ends in .pt, or begins with a config."""
    if isinstance(circuit, Circuit):
        return False
    path = Path(circuit)
    if path.suffix.lower() == ".pt":
        return True
    if mode_of(path) is None:
        return False
    with open(input_file(path, ""), "rb") as file:
        return b'"cfg"' in file.read(_BEGINNING)


def _most(layout: Layout) -> int:
    """Bytes that a file of this model may have."""
    return _ROOM + _PER_EDGE * layout.mask.size


def graph_kind(path: str | os.PathLike[str]) -> str:
    """``json`` or ``pt``, by the name of a file; raises for another name."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise HeadspanError(f"{path} is not the name of a graph file: it must end in {' or '.join(SUFFIXES)}")
    return suffix[1:]


# -- writing ---------------------------------------------------------------------------------------------------


def _nodes_inside(layout: Layout, inside: np.ndarray) -> np.ndarray:
    """Which sources are in the circuit: those with edges in and out, as in EAP-IG."""
    reached = {layout.targets[j].partition("<")[0] for j in np.flatnonzero(inside.any(axis=0))}
    entered = np.array([source == "input" or source in reached for source in layout.sources])
    return entered & inside.any(axis=1)


def _json_parts(
    layout: Layout, about: Mapping[str, Any], nodes: np.ndarray, scores: np.ndarray, inside: np.ndarray
) -> Iterator[str]:
    """The text of a file in parts, because the edges of a large model as one dictionary need gigabytes."""
    members = {name: {"in_graph": bool(here)} for name, here in zip(layout.sources, nodes, strict=True)}
    yield json.dumps({**about, "nodes": {**members, "logits": {"in_graph": True}}})[:-1]
    for i, source in enumerate(layout.sources):
        row = {
            f"{source}->{layout.targets[j]}": {"score": float(scores[i, j]), "in_graph": bool(inside[i, j])}
            for j in np.flatnonzero(layout.mask[i])
        }
        yield (', "edges": {' if i == 0 else ", ") + json.dumps(row)[1:-1]
    yield "}}\n"


def _save_pt(
    path: Path,
    layout: Layout,
    about: Mapping[str, Any],
    nodes: np.ndarray,
    scores: np.ndarray,
    inside: np.ndarray,
) -> None:
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", "writing a .pt file") from None
    content = {
        **about,
        "src_nodes": list(layout.sources),
        "dst_nodes": list(layout.targets),
        "edges_scores": torch.from_numpy(scores.astype(np.float32)),
        "edges_in_graph": torch.from_numpy(inside),
        "nodes_in_graph": torch.from_numpy(nodes),
    }
    torch.save(content, path)


# -- reading ---------------------------------------------------------------------------------------------------


def _read_json(path: str | os.PathLike[str], missing: str, layout: Layout) -> Any:
    text = read_text(path, missing, _WHAT, most=_most(layout))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeadspanError(f"{path} cannot be read as a graph file in JSON: {reason(error)[:120]}") from None


def _of_json(content: Any, path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    nodes, edges = _parts(content, path, layout, ("nodes", "edges"))
    scored = _check_nodes(nodes, path, layout)
    if not isinstance(edges, Mapping):
        raise HeadspanError(f"the edges of {path} must be an object with a score and in_graph for each edge")
    scores, inside = np.zeros(layout.mask.shape), np.zeros_like(layout.mask)
    rows = {name: i for i, name in enumerate(layout.sources)}
    columns = {name: j for j, name in enumerate(layout.targets)}
    for name, facts in edges.items():
        source, _, target = name.partition("->")
        i, j = rows.get(source, -1), columns.get(target, -1)
        if i < 0 or j < 0 or not layout.mask[i, j]:
            raise HeadspanError(f"{path} has the edge {name[:60]!r}, which this model does not have")
        scores[i, j], inside[i, j] = _edge(name, facts, path)
    _check_level(scored, scores, inside, path)
    return scores, inside


def _edge(name: str, facts: Any, path: str | os.PathLike[str]) -> tuple[float, bool]:
    """The score and the membership of an edge; files with scores alone or circuits alone leave out the other."""
    known = isinstance(facts, Mapping) and ("score" in facts or "in_graph" in facts)
    score, inside = (facts.get("score", 0.0), facts.get("in_graph", False)) if known else (None, None)
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not abs(score) < _LARGEST:
        raise HeadspanError(f"the score of the edge {name[:60]!r} of {path} must be a finite number")
    if not isinstance(inside, bool):
        raise HeadspanError(f"in_graph of the edge {name[:60]!r} of {path} must be true or false")
    return float(score), inside


def _check_nodes(nodes: Any, path: str | os.PathLike[str], layout: Layout) -> bool:
    """Check the names of the nodes of a JSON file; True if nodes have scores."""
    if not isinstance(nodes, Mapping):
        raise HeadspanError(f"the nodes of {path} must be an object with in_graph for each node")
    if unknown := [name for name in nodes if name not in {*layout.sources, "logits"}]:
        raise HeadspanError(f"{path} has the node {unknown[0][:60]!r}, which this model does not have")
    facts = [one for one in nodes.values() if isinstance(one, Mapping)]
    if any(key in one for one in facts for key in _NEURONS):
        raise _of_neurons(path)
    return any("score" in one for one in facts)


def _read_pt(path: Path, layout: Layout) -> Any:
    size = path.stat().st_size
    if size > _most(layout):
        raise HeadspanError(f"{path} has {size:,} bytes, too many for a graph of this model: give another file")
    return load_plain(path, _WHAT, "give a .json file, or one that to_pt of EAP-IG wrote")


def _of_pt(content: Any, path: Path, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    named = _parts(content, path, layout, ("src_nodes", "dst_nodes"))
    for names, ours in zip(named, (layout.sources, layout.targets), strict=True):
        _check_order(names, ours, path)
    if not {"edges_scores", "edges_in_graph"} & content.keys():
        raise HeadspanError(f"{path} has neither edges_scores nor edges_in_graph: it is not a graph file of EAP-IG")
    scores = _matrix(content, "edges_scores", path, layout).astype(np.float64)
    inside = _matrix(content, "edges_in_graph", path, layout).astype(bool)
    _check_level("nodes_scores" in content, scores * layout.mask, inside, path)
    return scores, inside


def _matrix(content: Mapping[str, Any], key: str, path: Path, layout: Layout) -> np.ndarray:
    """A tensor of the file, one number for each source and target; zeros if the file has none."""
    import torch

    tensor = content.get(key)
    if tensor is None:
        return np.zeros(layout.mask.shape)
    dtype = torch.bool if key == "edges_in_graph" else None
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or not (tensor.dtype == dtype if dtype else tensor.is_floating_point())
    ):
        raise HeadspanError(f"{key} of {path} must be a dense tensor of {'truth values' if dtype else 'numbers'}")
    if tuple(tensor.shape) != layout.mask.shape:
        raise HeadspanError(
            f"{key} of {path} has the shape {list(tensor.shape)}, and this model needs {list(layout.mask.shape)}"
        )
    return tensor.detach().to(torch.float64).numpy()


def _check_order(names: Any, ours: tuple[str, ...], path: Path) -> None:
    if not isinstance(names, list) or len(names) != len(ours):
        seen = f"{len(names)} names" if isinstance(names, list) else type(names).__name__
        raise HeadspanError(f"{path} must list its {len(ours)} nodes from {ours[0]} to {ours[-1]}, and has {seen}")
    for name, expected in zip(names, ours, strict=True):
        if name != expected:
            raise HeadspanError(f"{path} has the node {str(name)[:60]!r} in the place of {expected}")


def _parts(content: Any, path: str | os.PathLike[str], layout: Layout, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Some parts of a file, after checking that it is a graph of edges of this model."""
    if not isinstance(content, Mapping):
        raise HeadspanError(f"{path} holds no named parts: it is not a graph file of EAP-IG")
    if absent := [key for key in ("cfg", *keys) if key not in content]:
        raise HeadspanError(f"{path} has no {absent[0]}: it is not a graph file of EAP-IG")
    if any(key in content for key in _NEURONS):
        raise _of_neurons(path)
    config = content["cfg"]
    for key, value in layout.config.items():
        seen = config.get(key) if isinstance(config, Mapping) else None
        if type(seen) is not type(value):
            raise HeadspanError(f"the cfg of {path} must have {key} and does not: it is not a graph file of EAP-IG")
        if seen != value:
            raise HeadspanError(
                f"{path} is of another model: it has {key} {str(seen)[:20]}, and this model has {value}"
            )
    return tuple(content[key] for key in keys)


def _check_level(scored_nodes: bool, scores: np.ndarray, inside: np.ndarray, path: str | os.PathLike[str]) -> None:
    """Refuse a file that says something about nodes and nothing about edges."""
    if scored_nodes and not scores.any() and not inside.any():
        raise HeadspanError(f"{path} has scores of nodes and none of edges: make it at the level of edges")


def _of_neurons(path: str | os.PathLike[str]) -> HeadspanError:
    return HeadspanError(
        f"{path} is a circuit of single neurons, and an edge here is a whole head or MLP: make it at the level of edges"
    )
