"""Random models against the definitions in float64: layouts, families, number types, shards, blocks, routes, pair sets.

The weights of every head are drawn first; then they are packed as a family stores them, and what is scored is compared
with the similarities of the drawn weights (``tests/definitions.py``), rounded as they were stored.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
from place import Finding

import headspan as hs
from headspan.scoring import plan as planning

sys.path.insert(0, str(Path(__file__).parents[1]))

import definitions

TOLERANCE = 1e-5
CHECKED = 25  # pairs of each similarity and pairing
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
METRICS = ("pk", "cs", "simple_cs", "linear_cka", "procrustes")
PAIRINGS = [a + b for a in "QKVO" for b in "QKVO"]
Weights = dict[str, np.ndarray]  # by role: (layer, head, d, m)


class Layout(NamedTuple):
    """One random model and how it is scored."""

    family: str
    dtype: str
    layers: int
    heads: int
    kv: int
    d: int
    m: int
    shards: int
    index: bool
    body: bool
    fold: bool
    metrics: tuple[str, ...]
    pairings: tuple[str, ...]
    pairs: str
    route: str | None
    block: int | None
    seed: int


class Oracle:
    cpu_seconds, memory = 60.0, 2 << 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "oracle"

    def case(self, chance: random.Random) -> Layout:
        family = chance.choice(list(FAMILIES))
        heads = chance.choice([1, 2, 3, 4, 6])
        kv = chance.choice([n for n in range(1, heads + 1) if heads % n == 0])
        kv = {"mha": heads, "mqa": 1, "gqa": kv}[FAMILIES[family][0]]
        m = chance.choice([1, 2, 4, 6])
        # Where the width of a head follows from the width of the model there is no choice of both.
        d = heads * m if FAMILIES[family][1] else chance.choice([heads * m, 8, 12, 17, 32])
        return Layout(
            family, chance.choice(list(DTYPES)), chance.choice([1, 2, 3, 5]), heads, kv, d, m,
            shards=chance.choice([1, 1, 2, 3]), index=chance.random() < 0.6, body=chance.random() < 0.5,
            fold=chance.random() < 0.3 and family != "bert",
            metrics=tuple(chance.sample(METRICS, chance.choice([1, 2]))),
            pairings=tuple(chance.sample(PAIRINGS, chance.choice([1, 2, 4]))),
            pairs=chance.choice(["default", "default", "forward", "same-type", "all"]),
            route=chance.choice([None, "gram", "direct"]), block=chance.choice([None, 1, 2]),
            seed=chance.randrange(2**31),
        )  # fmt: skip

    def run(self, case: Layout) -> list[str]:
        rng = np.random.default_rng(case.seed)
        weights, gains = draw(case, rng)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        reference = weights if case.family == "arrays" else write(self.folder, case, weights, gains)
        if case.family == "arrays":
            reference = reference | {"norm": "rms", "gain": gains}
        opened = hs.open(reference)
        opened = hs.fold(opened) if case.fold else opened
        patch = mock.patch.object(
            planning, "_cut", lambda w, *rest: (planning._even_blocks(w.places, case.block), "blocks")
        )
        try:
            with patch if case.block else mock.MagicMock():
                scores = hs.score(opened, case.metrics, case.pairings, case.pairs, route=case.route)  # type: ignore[arg-type]
        except hs.HeadspanError as error:
            if case.pairs == "same-type" and not any(p[0] == p[1] for p in case.pairings):
                return [str(error)]
            raise Finding(f"refused: {error}") from None
        compare(case, scores, folded(case, weights, gains) if case.fold else exact(weights), rng)
        return []


def draw(case: Layout, rng: np.random.Generator) -> tuple[Weights, np.ndarray]:
    """Weights of every head and gains of the norm, as the number type holds them; columns of different size."""
    shapes = {role: (case.layers, case.kv if role in "KV" else case.heads, case.d, case.m) for role in "QKVO"}
    dtype, spread = DTYPES[case.dtype], rng.choice([0.0, 1.0])
    weights = {}
    for role, shape in shapes.items():
        sizes = 10 ** (spread * rng.uniform(-1, 1, (shape[0], shape[1], 1, shape[3])))
        weights[role] = (rng.normal(size=shape) * sizes).astype(dtype)
    return weights, (1 + 0.3 * rng.normal(size=(case.layers, case.d))).astype(dtype)


def exact(weights: Weights) -> Weights:
    return {role: array.astype(np.float64) for role, array in weights.items()}


def folded(case: Layout, weights: Weights, gains: np.ndarray) -> Weights:
    """γ into what reads; a LayerNorm's centring into everything."""
    found = exact(weights)
    for role in "QKV":
        found[role] = found[role] * gains.astype(np.float64)[:, None, :, None]
    if FAMILIES[case.family][2]:
        found = {role: array - array.mean(axis=2, keepdims=True) for role, array in found.items()}
    return found


def compare(case: Layout, scores: hs.Scores, weights: Weights, rng: np.random.Generator) -> None:
    wanted = [p for p in case.pairings if case.pairs != "same-type" or p[0] == p[1]]
    if {(m, str(p)) for m, p in scores.arrays} != {(m, p) for m in case.metrics for p in wanted}:
        raise Finding(f"the result holds {list(scores.arrays)}")
    for metric in case.metrics:
        for pairing in wanted:
            values = scores[metric, pairing].values
            needed = asked(case, pairing)
            if values.shape != needed.shape or not np.array_equal(np.isnan(values), ~needed):
                raise Finding(f"{metric} {pairing} has other pairs than were asked for")
            places = np.argwhere(needed)
            for i, j in rng.permutation(places)[:CHECKED]:
                if metric == "pk" and not full_rank(case, weights, pairing, int(i), int(j)):
                    continue
                expected = similarity(case, weights, metric, pairing, int(i), int(j))
                if not abs(values[i, j] - expected) <= TOLERANCE * max(1.0, abs(expected)):
                    raise Finding(f"{metric} {pairing} [{i}, {j}] is {values[i, j]}, not {expected}")


def asked(case: Layout, pairing: str) -> np.ndarray:
    """Which pairs of weights are compared."""
    counts = [case.kv if role in "KV" else case.heads for role in pairing]
    rows, columns = (np.arange(case.layers * count) for count in counts)
    forward = (rows // counts[0])[:, None] < (columns // counts[1])[None, :]
    same = pairing[0] == pairing[1]
    if case.pairs == "all":
        return np.ones(forward.shape, bool) & ~(np.eye(*forward.shape, dtype=bool) & same)
    if case.pairs == "same-type" or (case.pairs == "default" and same):
        return rows[:, None] < columns[None, :]
    return forward


def similarity(case: Layout, weights: Weights, metric: str, pairing: str, i: int, j: int) -> float:
    if metric != "cs":
        return definitions.similarity(
            metric, *(parts(case, weights, r, n) for r, n in zip(pairing, (i, j), strict=True)), pairing
        )
    one, two = (circuit(case, weights, role, n) for role, n in zip(pairing, (i, j), strict=True))
    return definitions.frobenius_ratio(two.T, one)


def full_rank(case: Layout, weights: Weights, pairing: str, i: int, j: int) -> bool:
    """Whether both weights span directions well above the rounding of their number type; below it none counts."""
    found = [parts(case, weights, role, n)[role] for role, n in zip(pairing, (i, j), strict=True)]
    noise = float(ml_dtypes.finfo(DTYPES[case.dtype]).eps) * (case.d**0.5 + case.m**0.5) / (case.d * case.m) ** 0.5
    return all(np.linalg.svd(w, compute_uv=False)[-1] > noise * np.linalg.norm(w) for w in found)


def parts(case: Layout, weights: Weights, role: str, number: int) -> dict[str, np.ndarray]:
    layer, head = divmod(number, case.kv if role in "KV" else case.heads)
    return {role: weights[role][layer, head]}


def circuit(case: Layout, weights: Weights, role: str, number: int) -> np.ndarray:
    """The circuit matrix of a weight: own times its partner's transpose; partners of a shared head are stacked."""
    layer, head = divmod(number, case.kv if role in "KV" else case.heads)
    partner, group = {"Q": "K", "K": "Q", "V": "O", "O": "V"}[role], case.heads // case.kv
    if role in "KV":
        other = np.concatenate(weights[partner][layer, head * group : (head + 1) * group], axis=0)
    else:
        other = weights[partner][layer, head // group]
    return weights[role][layer, head] @ other.T


# ------------------------------------------------------------------------------------------------ how it is stored


def rows(weight: np.ndarray) -> np.ndarray:
    """(head, d, m) as rows of a linear layer, (head·m, d)."""
    return weight.transpose(0, 2, 1).reshape(-1, weight.shape[1])


def grouped(case: Layout, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """For each key/value head its queries, its key, its value."""
    group = case.heads // case.kv
    blocks = [(*q[g * group : (g + 1) * group], k[g], v[g]) for g in range(case.kv)]
    return np.concatenate([weight.T for block in blocks for weight in block])


def separate(case: Layout, h: str, w: Weights, names: str = "self_attn.{}_proj") -> dict[str, np.ndarray]:
    return {h + names.format(role.lower()) + ".weight": rows(w[role]) for role in "QKV"}


def concatenated(case: Layout, w: Weights) -> np.ndarray:
    return np.concatenate([rows(w[role]) for role in "QKV"])


def output(w: Weights) -> np.ndarray:
    return w["O"].transpose(1, 0, 2).reshape(w["O"].shape[1], -1)


def gpt2(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    return {h + "attn.c_attn.weight": concatenated(case, w).T, h + "attn.c_proj.weight": output(w).T}


def llama(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    return separate(case, h, w) | {h + "self_attn.o_proj.weight": output(w)}


def phi3(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    return {h + "self_attn.qkv_proj.weight": concatenated(case, w), h + "self_attn.o_proj.weight": output(w)}


def neox(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    fused = grouped(case, w["Q"], w["K"], w["V"])
    return {h + "attention.query_key_value.weight": fused, h + "attention.dense.weight": output(w)}


def falcon(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    fused = grouped(case, w["Q"], w["K"], w["V"])
    return {h + "self_attention.query_key_value.weight": fused, h + "self_attention.dense.weight": output(w)}


def bigcode(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    return {h + "attn.c_attn.weight": concatenated(case, w), h + "attn.c_proj.weight": output(w)}


def bert(case: Layout, h: str, w: Weights) -> dict[str, np.ndarray]:
    names = {"Q": "query", "K": "key", "V": "value"}
    found = {h + f"attention.self.{names[role]}.weight": rows(w[role]) for role in "QKV"}
    return found | {h + "attention.output.dense.weight": output(w)}


# kind of heads, whether d_model is heads × d_head, whether the norm centres, name of the norm, body, layer, packing
FAMILIES: dict[str, tuple[Any, ...]] = {
    "arrays": ("gqa", False, False, "", "", "", None),
    "gpt2": ("mha", True, True, "ln_1", "transformer.", "h.{}.", gpt2),
    "llama": ("gqa", False, False, "input_layernorm", "model.", "layers.{}.", llama),
    "qwen3": ("gqa", False, False, "input_layernorm", "model.", "layers.{}.", llama),
    "phi3": ("gqa", False, False, "input_layernorm", "model.", "layers.{}.", phi3),
    "gpt_neox": ("mha", True, True, "input_layernorm", "gpt_neox.", "layers.{}.", neox),
    "falcon": ("gqa", True, True, "ln_attn", "transformer.", "h.{}.", falcon),
    "gpt_bigcode": ("mqa", True, True, "ln_1", "transformer.", "h.{}.", bigcode),
    "bert": ("mha", True, True, "", "bert.", "encoder.layer.{}.", bert),
}


def write(folder: Path, case: Layout, weights: Weights, gains: np.ndarray) -> Path:
    """The checkpoint as a directory."""
    _, _, centred, norm, body, layer, pack = FAMILIES[case.family]
    tensors: dict[str, np.ndarray] = {}
    for i in range(case.layers):
        h = (body if case.body else "") + layer.format(i)
        tensors |= pack(case, h, {role: weights[role][i] for role in "QKVO"})
        if norm:
            tensors[f"{h}{norm}.weight"] = gains[i]
            tensors |= {f"{h}{norm}.bias": np.zeros_like(gains[i])} if centred else {}
    folder.mkdir(parents=True)
    config = {
        "model_type": case.family, "hidden_size": case.d, "num_hidden_layers": case.layers, "vocab_size": 7,
        "num_attention_heads": case.heads, "num_key_value_heads": case.kv, "head_dim": case.m,
        "multi_query": case.family == "gpt_bigcode", "new_decoder_architecture": True, "num_kv_heads": case.kv,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = min(case.shards, len(names))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors, case.dtype))
        return folder
    weight_map = {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[s::shards]}
        (folder / file).write_bytes(safetensors(part, case.dtype))
        weight_map |= dict.fromkeys(part, file)
    if case.index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def safetensors(tensors: dict[str, np.ndarray], dtype: str) -> bytes:
    header: dict[str, Any] = {}
    body = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body
