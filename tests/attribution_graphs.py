"""A small model with transcoders and an attribution graph with the fields that circuit-tracer and Neuronpedia write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import headspan as hs

D, LAYERS, HEADS, FEATURES = 24, 4, 3, 40
PLANTED = "L2H1"  # carries feature 5 of layer 0 to feature 7 of layer 3, and feature 6 with the opposite sign
Edge = tuple[tuple[int, int, int], tuple[int, int, int], float]
EDGES: list[Edge] = [
    ((0, 5, 1), (3, 7, 4), 9.0), ((0, 6, 1), (3, 7, 4), -7.0), ((1, 2, 4), (3, 7, 4), 5.0), ((0, 9, 2), (2, 3, 4), 1.0),
]  # fmt: skip


def vectors() -> dict[int, dict[str, np.ndarray]]:
    """W_enc and W_dec of every layer, features in rows."""
    rng = np.random.default_rng(1)
    return {n: {key: rng.normal(size=(FEATURES, D)) for key in ("W_enc", "W_dec")} for n in range(LAYERS)}


def model(kv: int = HEADS, planted: bool = True) -> dict[str, Any]:
    """Random heads, and one that maps a decoder vector to an encoder vector."""
    rng, tc = np.random.default_rng(2), vectors()
    counts = {"Q": HEADS, "K": kv, "V": kv, "O": HEADS}
    weights = {role: rng.normal(size=(LAYERS, n, D, 4)) for role, n in counts.items()}
    if planted:
        weights["V"][2, 1 if kv == HEADS else 0, :, 0] = 3 * (tc[0]["W_dec"][5] - tc[0]["W_dec"][6])
        weights["O"][2, 1, :, 0] = 3 * tc[3]["W_enc"][7]
    return weights


def save_transcoders(folder: Path, kind: str) -> str:
    """As files of circuit-tracer (W_enc by features), of Gemma Scope (W_enc by inputs) or as folders of SAELens."""
    for layer, stored in vectors().items():
        small = {key: value.astype(np.float32) for key, value in stored.items()}
        turned = {"W_enc": np.ascontiguousarray(small["W_enc"].T), "W_dec": small["W_dec"]}
        if kind == "circuit-tracer":
            save_file(small | {"b_enc": np.zeros(FEATURES, np.float32)}, folder / f"layer_{layer}.safetensors")
        elif kind == "gemma-scope":
            (folder / f"layer_{layer}").mkdir()
            np.savez(folder / f"layer_{layer}/params.npz", **turned, threshold=np.ones(FEATURES))
        else:
            place = folder / f"blocks.{layer}"
            place.mkdir()
            save_file(turned, place / "sae_weights.safetensors")
            hooks = {"hook_name": f"blocks.{layer}.hook_mlp_in", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
            (place / "cfg.json").write_text(json.dumps({"architecture": "transcoder", "d_out": D, **hooks}))
    ending = {"circuit-tracer": "layer_{}.safetensors", "gemma-scope": "layer_{}/params.npz", "sae-lens": "blocks.{}"}
    return str(folder / ending[kind])


def node(layer: int, feature: int, position: int, kind: str = "cross layer transcoder") -> dict[str, Any]:
    """A node as circuit-tracer writes it; ``feature`` is paired with the layer, as Neuronpedia wants it."""
    paired = (layer + feature) * (layer + feature + 1) // 2 + feature
    return {
        "node_id": f"{layer}_{feature}_{position}", "feature": paired, "layer": str(layer), "ctx_idx": position,
        "feature_type": kind, "token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0,
        "jsNodeId": f"{layer}_{feature}-0", "clerp": "", "influence": 0.5, "activation": 2.0,
    }  # fmt: skip


def content() -> dict[str, Any]:
    ends = dict.fromkeys(end for source, target, _ in EDGES for end in (source, target))
    nodes = [node(*end) for end in ends]
    nodes.append({**node(0, 11, 0), "node_id": "E_11_0", "layer": "E", "feature_type": "embedding"})
    nodes.append({**node(5, 3, 4), "feature_type": "logit"})
    # An error of layer 2 at token 1 has the id of feature 2 of layer 0.
    nodes.append({**node(0, 2, 1), "layer": "2", "feature": -1, "feature_type": "mlp reconstruction error"})
    links = [{"source": "_".join(map(str, s)), "target": "_".join(map(str, t)), "weight": w} for s, t, w in EDGES]
    links += [
        {"source": "E_11_0", "target": "0_5_1", "weight": 20.0},
        {"source": "3_7_4", "target": "5_3_4", "weight": 30.0},
    ]
    links.append({"source": "0_2_1", "target": "3_7_4", "weight": 4.0})
    about = {"slug": "planted", "scan": "a-model", "transcoder_list": [], "prompt_tokens": ["a", "b"], "prompt": "ab"}
    asked = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {"metadata": about, "qParams": asked, "nodes": nodes, "links": links[::-1]}


def saved(folder: Path, kv: int = HEADS) -> tuple[str, Path]:
    """The places of the transcoders and of the graph."""
    path = folder / "graph.json"
    path.write_text(json.dumps(content()))
    return save_transcoders(folder, "circuit-tracer"), path


def weights(kv: int = HEADS, planted: bool = True) -> Any:
    return hs.open(model(kv, planted))


def for_demo(folder: Path) -> tuple[str, Path]:
    """Random transcoders of the demo model, and a graph with one link."""
    rng = np.random.default_rng(0)
    for layer in (0, 1):
        np.savez(folder / f"{layer}.npz", W_enc=rng.normal(size=(9, 256)), W_dec=rng.normal(size=(9, 256)))
    links = [{"source": "0_3_1", "target": "1_4_2", "weight": 2.5}]
    graph = {"metadata": {"slug": "x\x1b[31m"}, "qParams": {}, "nodes": [node(0, 3, 1), node(1, 4, 2)], "links": links}
    (folder / "graph.json").write_text(json.dumps(graph))
    return str(folder / "{}.npz"), folder / "graph.json"
