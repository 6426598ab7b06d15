"""Small valid files of every kind that is read: what the fuzzer starts from, and the numbers they hold."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

D, HEADS, KV, LAYERS, VOCAB = 16, 4, 2, 2, 12
M, POSITIONS = D // HEADS, 64
GPT2_CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": D,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": POSITIONS,
    "vocab_size": VOCAB,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "head_dim": M,
    "intermediate_size": 2 * D,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
}
NOT_TEXT = "m\udcff\x1b"  # the name of a folder: bytes that are not UTF-8, and an escape code
WORDS = ["a", "b", "c", "Ġ", "Ġa", "Ċ", "ab", "Ġab", "ðŁ", "d", "e", "<|end|>"]


@dataclass
class GgufParts:
    """A GGUF file in pieces that can be changed one by one; ``emit`` writes whatever they say."""

    values: list[tuple[str, int, bytes]]  # key, type, encoded value
    tensors: list[tuple[str, list[int], int, int]]  # name, dimensions, type, offset
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None
    magic: bytes = b"GGUF"
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> bytes of data

    def emit(self) -> bytes:
        n_tensors, n_values = self.counts or (len(self.tensors), len(self.values))
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_values)
        for key, kind, value in self.values:
            head += gguf_text(key) + struct.pack("<I", kind) + value
        for name, dimensions, kind, offset in self.tensors:
            head += gguf_text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            head += struct.pack("<IQ", kind, offset)
        return head + bytes(-len(head) % 32) + self.data


def gguf_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def gguf_texts(texts: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(texts)) + b"".join(map(gguf_text, texts))


def gguf_parts() -> GgufParts:
    """A llama of two layers, one tensor of it quantised as Q8_0, with its vocabulary."""
    rng = np.random.default_rng(3)
    d, heads, kv = 32, 4, 2
    sizes = {
        "llama.block_count": 2, "llama.context_length": 64, "llama.embedding_length": d,
        "llama.attention.head_count": heads, "llama.attention.head_count_kv": kv, "llama.vocab_size": VOCAB,
        "llama.rope.dimension_count": d // heads, "tokenizer.ggml.bos_token_id": 0,
        "llama.feed_forward_length": 32,
    }  # fmt: skip
    values = [("general.architecture", 8, gguf_text("llama"))]
    values += [(key, 4, struct.pack("<I", number)) for key, number in sizes.items()]
    values += [
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-6)),
        ("tokenizer.ggml.model", 8, gguf_text("gpt2")),
        ("tokenizer.ggml.tokens", 9, gguf_texts(WORDS)),
        ("tokenizer.ggml.merges", 9, gguf_texts(["a b", "Ġ a"])),
        ("tokenizer.ggml.token_type", 9, struct.pack("<IQ12i", 5, 12, *[1] * 11, 3)),
    ]
    arrays: dict[str, np.ndarray] = {"token_embd.weight": rng.normal(size=(VOCAB, d))}
    for layer in range(2):
        for name, rows in (("attn_q", d), ("attn_k", d // 2), ("attn_v", d // 2), ("attn_output", d)):
            arrays[f"blk.{layer}.{name}.weight"] = rng.normal(size=(rows, d))
        arrays[f"blk.{layer}.attn_norm.weight"] = np.ones(d)
        arrays[f"blk.{layer}.ffn_norm.weight"] = np.ones(d)
        arrays |= {f"blk.{layer}.ffn_{name}.weight": rng.normal(size=(32, d)) for name in ("up", "gate", "down")}
    arrays["output_norm.weight"] = np.ones(d)
    parts = GgufParts(values, [], b"")
    for name, array in arrays.items():
        kind, raw = 0, array.astype("<f4").tobytes()
        if name == "blk.1.attn_v.weight":  # Q8_0: a float16 scale and 32 signed bytes a block
            kind = 8
            blocks = rng.integers(-100, 100, (len(array), 32), dtype=np.int8)
            raw = b"".join(struct.pack("<e", 0.01) + block.tobytes() for block in blocks)
        offset = len(parts.data)
        parts.tensors.append((name, list(array.shape[::-1]), kind, offset))
        parts.spans[name] = (offset, offset + len(raw))
        parts.data += raw + bytes(-len(raw) % 32)
    return parts


def gpt2_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    found = {"wte.weight": (VOCAB, D), "wpe.weight": (POSITIONS, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for layer in range(LAYERS):
        h = f"h.{layer}."
        found |= {h + "attn.c_attn.weight": (D, 3 * D), h + "attn.c_attn.bias": (3 * D,)}
        found |= {h + "attn.c_proj.weight": (D, D), h + "attn.c_proj.bias": (D,)}
        found |= {h + "ln_1.weight": (D,), h + "ln_1.bias": (D,), h + "mlp.c_fc.weight": (D, 4 * D)}
        found |= {h + "mlp.c_fc.bias": (4 * D,), h + "mlp.c_proj.weight": (4 * D, D), h + "mlp.c_proj.bias": (D,)}
        found |= {h + "ln_2.weight": (D,), h + "ln_2.bias": (D,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in found.items()}


def llama_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    found = {"model.embed_tokens.weight": (VOCAB, D), "lm_head.weight": (VOCAB, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        h = f"model.layers.{layer}."
        found |= {h + "self_attn.q_proj.weight": (D, D), h + "self_attn.o_proj.weight": (D, D)}
        found |= {h + f"self_attn.{x}_proj.weight": (KV * M, D) for x in "kv"}
        found |= {h + "input_layernorm.weight": (D,), h + "post_attention_layernorm.weight": (D,)}
        found |= {h + f"mlp.{x}_proj.weight": (2 * D, D) for x in ("up", "gate")}
        found |= {h + "mlp.down_proj.weight": (D, 2 * D)}
    return {name: rng.normal(size=shape).astype(np.float16) for name, shape in found.items()}


def tokenizer_json() -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 11, "content": "<|end|>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(WORDS)}, "merges": [["a", "b"], ["Ġ", "a"]]},
    }


def write_seeds(folder: Path) -> None:
    """gpt2/ (one file, tokenizer.json), llama/ (two shards, vocab.json), llama.gguf, result.safetensors, labels.csv."""
    gpt2, llama = folder / "gpt2", folder / "llama"
    for place in (gpt2, llama):
        place.mkdir(parents=True)
    (gpt2 / "config.json").write_text(json.dumps(GPT2_CONFIG))
    (gpt2 / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    save_file(gpt2_tensors(), gpt2 / "model.safetensors", {"format": "pt"})
    (llama / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (llama / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(WORDS)}))
    (llama / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n", encoding="utf-8")
    tensors = llama_tensors()
    weight_map = {}
    for shard in (1, 2):
        name = f"model-0000{shard}-of-00002.safetensors"
        part = {key: array for key, array in tensors.items() if (".layers.1." in key) == (shard == 2)}
        save_file(part, llama / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "llama.gguf").write_bytes(gguf_parts().emit())
    import headspan as hs

    scores = hs.score(hs.open(gpt2), ["pk", "cs"], ["OQ", "OK", "KO", "KK"])
    scores.provenance["reference"] = "gpt2"  # the same bytes wherever the folder is
    scores.save(folder / "result.safetensors")
    (folder / "labels.csv").write_text("# classes\nhead,label\nL0H1,copy\nL0H1,other\nL1H3,induction\n")


def write_extras(folder: Path) -> None:
    """Beside the seeds: models of one layer, of other weights, of an odd name; further results; a text."""
    import headspan as hs

    tuned = folder / "tuned"
    shutil.copytree(folder / "gpt2", tuned)
    shutil.copytree(folder / "gpt2", folder / NOT_TEXT)
    other = {name: (array + 0.1 * array[::-1]).astype(np.float32) for name, array in gpt2_tensors().items()}
    save_file(other, tuned / "model.safetensors")

    one = folder / "one"
    one.mkdir()
    (one / "config.json").write_text(json.dumps(GPT2_CONFIG | {"n_layer": 1}))
    save_file({n: a for n, a in gpt2_tensors().items() if "h.1." not in n}, one / "model.safetensors")
    rng = np.random.default_rng(4)
    scores = hs.score(folder / "gpt2", "all", "all")
    heads = len(scores.heads("O"))
    names = ("identity", "previous_token", "duplicate_token", "induction")
    table = {kind: {str(head): float(rng.random()) for head in scores.heads("Q")} for kind in names}
    (folder / "behaviour.json").write_text(json.dumps(table))
    forward = scores["pk", "OK"].forward().values
    scores.extra["effect/random/OK"] = np.where(np.isnan(forward), np.nan, rng.random((heads, heads), np.float32))
    scores.extra["effect/write_norms"] = rng.random(heads, np.float32)
    scores.save(folder / "used.safetensors")
    scores.extra.clear()
    scores.arrays.clear()
    scores.save(folder / "empty.safetensors")
    write_inputs(folder, rng)
    hs.observe(folder / "gpt2", tokens=[[1, 2, 3, 4], [2, 4, 1, 3]], out=folder / "stats.safetensors")
    hs.task(folder / "gpt2", "induction", prompts=2, k=2, method="eap", out=folder / "task.safetensors")
    (folder / "text.txt").write_text("a b c ab a b c d e ab " * 3, encoding="utf-8")


def write_inputs(folder: Path, rng: np.random.Generator) -> None:
    """What is given beside a model: vectors, a sparse autoencoder, a LoRA adapter, a circuit, components."""
    np.save(folder / "probe.npy", rng.normal(size=(3, D)))
    np.savez(folder / "probes.npz", a=rng.normal(size=D), b=rng.normal(size=(D, 2)))
    vectors = {"u": rng.normal(size=D), "v": rng.normal(size=(5, D)), "bases": rng.normal(size=(2, D, 3))}
    save_file({n: a.astype(np.float32) for n, a in vectors.items()}, folder / "vectors.safetensors")
    (folder / "sae").mkdir()
    (folder / "sae" / "cfg.json").write_text(json.dumps({"hook_name": "blocks.1.hook_resid_pre"}))
    features = {"W_enc": rng.normal(size=(D, 30)), "W_dec": rng.normal(size=(30, D))}
    save_file({n: a.astype(np.float32) for n, a in features.items()}, folder / "sae" / "sae_weights.safetensors")
    (folder / "lora").mkdir()
    modules = {"c_attn": (D, 3 * D), "c_proj": (D, D)}
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(modules), "fan_in_fan_out": True}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(about | {"bias": "none", "use_rslora": False}))
    change = {
        f"base_model.model.transformer.h.{i}.attn.{name}.lora_{side}.weight": rng.normal(size=shape)
        for i in range(LAYERS)
        for name, (d_in, d_out) in modules.items()
        for side, shape in (("A", (2, d_in)), ("B", (d_out, 2)))
    }
    save_file({n: a.astype(np.float32) for n, a in change.items()}, folder / "lora" / "adapter_model.safetensors")
    edge = {"source": "L0H1.O", "target": "L1H3.K", "metric": "pk", "score": 1.0}
    circuit = {"format": "headspan circuit", "version": 1, "name": "c", "model": "gpt2", "nodes": ["L0H1"]}
    (folder / "circuit.json").write_text(json.dumps(circuit | {"edges": [edge]}))
    for layer in (0, 1):
        np.savez(folder / f"tc{layer}.npz", W_enc=rng.normal(size=(6, D)), W_dec=rng.normal(size=(6, D)))
    ends = [{"node_id": f"{n}_2_1", "layer": str(n), "ctx_idx": 1, "feature_type": "transcoder"} for n in (0, 1)]
    link = {"source": "0_2_1", "target": "1_2_1", "weight": 1.5}
    (folder / "graph.json").write_text(json.dumps({"metadata": {"slug": "g"}, "nodes": ends, "links": [link]}))
    factors = {"V": rng.normal(size=(D, 4)), "U": rng.normal(size=(4, 3 * D))}
    components = {f"_components.h-0-attn-c_attn.{name}": a.astype(np.float32) for name, a in factors.items()}
    save_file(components, folder / "components.safetensors")
