"""Changes to valid files, from one flipped bit to a header that lies in a well-formed way."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from seeds import GgufParts, gguf_parts, gguf_text

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 16, 2**31, 2**32 + 1, 2**63 - 1, 2**64, 10**30, 1.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), "", "abc", "12", "gpt2", "llama", "mamba", "../../x", "/etc/passwd", "\0", "é\ud800",
    "x" * 5000, "a b " * 1500, "=1+1", [], {}, [1, 2], [0, 4], [4, 4], [[1]], [None], {"a": 1}, {"0": {"0": {}}},
    [2**62, 4], [-1, 16],
    "F16", "BF16", "F64", "I64", "U8", "F8_E4M3", "BOOL", "F4", [16, 16], [0, 1024], [0, 2**40], ["full_attention"],
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


class Case(NamedTuple):
    """One changed file: where it goes, its bytes, what was done, and the tensors whose bytes alone were changed.

    ``touched`` is None when anything may read differently; otherwise every other tensor must read as before.
    """

    target: str
    content: bytes
    kind: str
    touched: frozenset[str] | None = None


def damage(content: bytes, chance: random.Random, scale: int = 200) -> bytes:
    """A few random edits, nearer the start than the end."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        if not changed:
            break
        place = min(int(chance.expovariate(1 / scale)), len(changed) - 1)
        kind = chance.randrange(6)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place] = chance.choice(b'\0\1\x7f\xff09-[{",:')
        elif kind == 2:
            del changed[place : place + chance.randint(1, 9)]
        elif kind == 3:
            changed[place:place] = chance.randbytes(chance.randint(1, 9))
        elif kind == 4:
            changed[place : place + 8] = struct.pack("<Q", chance.choice(NUMBERS))
        else:
            other = chance.randrange(len(changed))
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed[: chance.randint(0, len(changed))]) if chance.random() < 0.08 else bytes(changed)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [path, *(found for key in keys for found in places(tree[key], (*path, key)))]


def change_tree(tree: Any, chance: random.Random) -> Any:
    """One to three values of a JSON tree replaced, removed, renamed, swapped or moved by a little."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        path = chance.choice(places(tree))
        if not path:
            if chance.random() < 0.05:
                return chance.choice(HOSTILE)
            continue
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        key, value, kind = path[-1], parent[path[-1]], chance.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[chance.choice(["x", "", str(key) + "s", str(key)[:-1], "__metadata__"])] = parent.pop(key)
        elif kind == 2 and isinstance(parent, dict):
            parent[key] = deepcopy(parent[chance.choice(list(parent))])
        elif kind == 3 and type(value) in (int, float):
            parent[key] = value + chance.choice([-1, 1, -4, 4, 0.5, 16])
        elif kind == 4 and isinstance(value, str):
            raw = damage(value.encode(errors="surrogatepass"), chance, scale=10)
            parent[key] = raw.decode("utf-8", "replace")
        elif kind == 5 and isinstance(parent, list):
            parent.append(deepcopy(value))
        else:
            parent[key] = deepcopy(chance.choice(HOSTILE))
    return tree


def json_bytes(tree: Any, chance: random.Random) -> bytes:
    """JSON text; sometimes with a key that stands twice, or with a depth no parser likes."""
    text = json.dumps(tree)
    if chance.random() < 0.05 and text.startswith("{") and len(text) > 2:
        text = "{" + text[1:-1] + "," + text[1:]
    if chance.random() < 0.01:
        text = "[" * 100_000
    return text.encode("utf-8", "replace")


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_safetensors(header: Any, body: bytes, chance: random.Random) -> bytes:
    raw = json_bytes(header, chance)
    length = chance.choice(NUMBERS) if chance.random() < 0.03 else len(raw)
    return struct.pack("<Q", length) + raw + body


def safetensors_header(content: bytes, chance: random.Random) -> bytes:
    """A header that is still JSON but says something else: one tensor's entry, or any value of the tree."""
    header, body = split_safetensors(content)
    names = [name for name in header if name != "__metadata__"]
    name, kind = chance.choice(names), chance.randrange(6)
    entry = header[name]
    if kind == 0:
        entry["dtype"] = chance.choice(["F16", "BF16", "F64", "I32", "F8_E5M2", "X", None, 3, "F32", "BOOL", "U64"])
    elif kind == 1:
        seen = entry["shape"]
        entry["shape"] = chance.choice([seen[::-1], [*seen, 1], [], [0], [2**62, 2**62], [-1], None])
    elif kind == 2:
        begin, end = entry["data_offsets"]
        shift = chance.choice([-4, 4, 2**40, 1])
        entry["data_offsets"] = chance.choice([[end, begin], [begin, end + shift], [begin + shift, end], [0, end]])
    elif kind == 3:
        other = chance.choice(names)
        header[name], header[other] = header[other], header[name]
    elif kind == 4:
        names = [name + "x", "h.2.attn.c_attn.weight", "h.99999999999.attn.c_attn.weight"]
        header[chance.choice(names)] = header.pop(name)
    else:
        header = change_tree(header, chance)
    return join_safetensors(header, body, chance)


def safetensors_body(content: bytes, chance: random.Random) -> tuple[bytes, frozenset[str]]:
    """Bytes of one tensor changed: NaN, infinity, zeros, huge, noise; every other tensor must read as before."""
    header, body = split_safetensors(content)
    name = chance.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    start = chance.randrange(begin, end)
    stop = min(end, start + chance.choice([1, 2, 4, 64, end]))
    patterns = [b"\xff", b"\0", b"\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", chance.randbytes(7)]
    pattern = chance.choice(patterns)
    filling = (pattern * (stop - start))[: stop - start]
    start_of_body = len(content) - len(body)
    return content[: start_of_body + start] + filling + content[start_of_body + stop :], frozenset({name})


def gguf_value(chance: random.Random) -> tuple[int, bytes]:
    """A metadata value of any type, or of a type that does not exist."""
    kind = chance.choice([0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 255])
    if kind == 8:
        texts = ["llama", "qwen2", "nonsense", "", "x" * 300]
        return 8, chance.choice([gguf_text(chance.choice(texts)), struct.pack("<Q", chance.choice(NUMBERS))])
    if kind == 9:
        count = chance.choice([0, 1, 2, 12, *NUMBERS])
        return 9, struct.pack("<IQ", chance.choice([0, 4, 5, 6, 8, 9, 99]), count) + chance.randbytes(48)
    letter = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}.get(kind, "Q")
    if letter in "fd":
        return kind, struct.pack("<" + letter, chance.choice([0.0, -1.0, 1e30, float("nan"), float("inf")]))
    if letter == "?":
        return kind, bytes([chance.randrange(256)])
    bits = 8 * struct.calcsize("<" + letter) - (letter in "iq")
    number = chance.choice(NUMBERS) % 2**bits
    return kind, struct.pack("<" + letter, -number if letter in "iq" and chance.random() < 0.3 else number)


def gguf_structure(chance: random.Random) -> bytes:
    """A GGUF file whose parts lie: values, types, counts, names, dimensions, offsets."""
    parts = gguf_parts()
    for _ in range(chance.choice([1, 1, 2])):
        _change_gguf(parts, chance)
    return parts.emit()


def _change_gguf(parts: GgufParts, chance: random.Random) -> None:
    kind = chance.randrange(10)
    i, j = chance.randrange(len(parts.values)), chance.randrange(len(parts.tensors))
    key, _, _ = parts.values[i]
    name, dimensions, number, offset = parts.tensors[j]
    if kind <= 2:
        parts.values[i] = (key, *gguf_value(chance))
    elif kind == 3:
        parts.values.append((chance.choice([key, "general.alignment", "split.count", "x"]), *gguf_value(chance)))
    elif kind == 4 and len(parts.values) > 1:
        del parts.values[i]
    elif kind == 5:
        place = chance.randrange(len(dimensions)) if dimensions else 0
        changed = [*dimensions[:place], chance.choice([0, 1, 31, 64, 2**40, 2**63]), *dimensions[place + 1 :]]
        wrong = chance.choice([changed, dimensions[::-1], [], [1] * 9, [*dimensions, 1]])
        parts.tensors[j] = (name, wrong, number, offset)
    elif kind == 6:
        parts.tensors[j] = (name, dimensions, chance.choice([0, 1, 2, 3, 8, 12, 14, 24, 30, 99, 2**31]), offset)
    elif kind == 7:
        moved = chance.choice([offset + 32, offset + 1, 0, 2**40, 2**63, max(0, offset - 32)])
        parts.tensors[j] = (name, dimensions, number, moved)
    elif kind == 8:
        names = ["blk.0.attn_q.weight", "blk.999999999999.attn_q.weight", "", "blk.-1.attn_q.weight", name + "x"]
        parts.tensors[j] = (chance.choice(names), dimensions, number, offset)
    else:
        parts.counts = (chance.choice([len(parts.tensors), *NUMBERS]), chance.choice([len(parts.values), *NUMBERS]))
        parts.version = chance.choice([3, 3, 2, 1, 4, 0x03000000])


def gguf_body(content: bytes, chance: random.Random) -> tuple[bytes, frozenset[str]]:
    parts = gguf_parts()
    name = chance.choice(list(parts.spans))
    begin, end = parts.spans[name]
    start = chance.randrange(begin, end)
    stop = min(end, start + chance.choice([1, 4, 64]))
    data = parts.data[:start] + chance.choice([b"\xff", b"\0", b"\x7f"]) * (stop - start) + parts.data[stop:]
    return content[: len(content) - len(parts.data)] + data, frozenset({name})


def change_labels(text: str, chance: random.Random) -> bytes:
    lines = text.splitlines()
    cells = ["L0H1", "L9H9", "L-1H0", "l1h2", "L1KV0", "L99999999999H1", "head", "label", "", '"', "a,b", "\0"]
    cells.append("x" * 200_000)
    for _ in range(chance.randint(0, 2)):
        place = chance.randrange(len(lines) + 1)
        lines.insert(place, chance.choice([",", "", ";"]).join(chance.choices(cells, k=chance.randint(1, 3))))
    lines += [f"L{chance.randrange(3)}H{chance.randrange(9)},{chance.choice(['copy', 'ä', 'x y', '1'])}"]
    raw = chance.choice(["\n", "\r\n", "\r", "\x85"]).join(lines).encode()
    return damage(raw, chance, scale=30) if chance.random() < 0.5 else raw


def _tree(name: str) -> Callable[[Path, random.Random], bytes]:
    def change(seed: Path, chance: random.Random) -> bytes:
        return json_bytes(change_tree(json.loads((seed / name).read_bytes()), chance), chance)

    return change


def _result_metadata(seed: Path, chance: random.Random) -> bytes:
    header, body = split_safetensors((seed / "result.safetensors").read_bytes())
    head = json.loads(header["__metadata__"]["headspan"])
    header["__metadata__"]["headspan"] = json_bytes(change_tree(head, chance), chance).decode("utf-8", "replace")
    return join_safetensors(header, body, chance)


def make_case(seed: Path, chance: random.Random) -> Case:
    """The next case: which file, and how it is changed."""
    trees = {
        "config": ("gpt2/config.json", 10), "llama config": ("llama/config.json", 10),
        "index": ("llama/model.safetensors.index.json", 7), "tokenizer": ("gpt2/tokenizer.json", 7),
        "vocab": ("llama/vocab.json", 4),
    }  # fmt: skip
    weights = {kind: weight for kind, (_, weight) in trees.items()} | {
        "header": 12, "body": 7, "bytes": 6, "shard": 6, "merges": 2, "gguf": 12, "gguf body": 5, "gguf bytes": 5,
        "result metadata": 8, "result header": 5, "result body": 3, "result bytes": 4, "labels": 5, "json bytes": 4,
    }  # fmt: skip
    kind = chance.choices(list(weights), list(weights.values()))[0]
    if kind in trees:
        target = trees[kind][0]
        harmless = frozenset() if kind in ("tokenizer", "vocab") else None
        return Case(target, _tree(target)(seed, chance), kind, harmless)
    one, shard = "gpt2/model.safetensors", f"llama/model-0000{chance.randint(1, 2)}-of-00002.safetensors"
    result, gguf = "result.safetensors", "llama.gguf"
    if kind == "header":
        return Case(one, safetensors_header((seed / one).read_bytes(), chance), kind)
    if kind == "body":
        return Case(one, *_with_kind(safetensors_body((seed / one).read_bytes(), chance), kind))
    if kind == "shard":
        if chance.random() < 0.5:
            return Case(shard, *_with_kind(safetensors_body((seed / shard).read_bytes(), chance), kind))
        return Case(shard, safetensors_header((seed / shard).read_bytes(), chance), kind)
    if kind == "merges":
        return Case("llama/merges.txt", damage((seed / "llama/merges.txt").read_bytes(), chance), kind, frozenset())
    if kind == "gguf":
        return Case(gguf, gguf_structure(chance), kind)
    if kind == "gguf body":
        return Case(gguf, *_with_kind(gguf_body((seed / gguf).read_bytes(), chance), kind))
    if kind == "result metadata":
        return Case(result, _result_metadata(seed, chance), kind)
    if kind == "result header":
        return Case(result, safetensors_header((seed / result).read_bytes(), chance), kind)
    if kind == "result body":
        return Case(result, safetensors_body((seed / result).read_bytes(), chance)[0], kind)
    if kind == "labels":
        return Case("labels.csv", change_labels((seed / "labels.csv").read_text(), chance), kind)
    if kind == "json bytes":
        target = chance.choice([name for name, _ in trees.values()])
        return Case(target, damage((seed / target).read_bytes(), chance), kind)
    target = {"bytes": one, "gguf bytes": gguf, "result bytes": result}[kind]
    return Case(target, damage((seed / target).read_bytes(), chance), kind)


INPUTS = {  # files that are given beside a model, and how often each is changed
    "probe.npy": 3, "probes.npz": 3, "vectors.safetensors": 4, "sae/cfg.json": 3, "sae/sae_weights.safetensors": 3,
    "lora/adapter_config.json": 4, "lora/adapter_model.safetensors": 4, "circuit.json": 4, "labels.csv": 3,
}  # fmt: skip


def input_case(seed: Path, chance: random.Random) -> Case:
    """A case that changes a file of vectors, an autoencoder, an adapter, a circuit or labels."""
    target = chance.choices(list(INPUTS), list(INPUTS.values()))[0]
    content = (seed / target).read_bytes()
    if target.endswith(".json") and chance.random() < 0.85:
        return Case(target, _tree(target)(seed, chance), target)
    if target == "labels.csv":
        return Case(target, change_labels(content.decode(), chance), target)
    if target.endswith(".safetensors") and chance.random() < 0.7:
        if chance.random() < 0.4:
            return Case(target, *_with_kind(safetensors_body(content, chance), target))
        return Case(target, safetensors_header(content, chance), target)
    if target.endswith((".npy", ".npz")) and chance.random() < 0.5:
        return Case(target, numpy_file(target, chance), target)
    return Case(target, damage(content, chance, scale=60), target)


def numpy_file(name: str, chance: random.Random) -> bytes:
    """A whole numpy file of odd arrays: shapes, number types, byte orders, names, Python objects."""
    shapes = [
        (),
        (0,),
        (16,),
        (3, 16),
        (16, 3),
        (16, 16),
        (2, 16, 3),
        (2, 3, 16),
        (1, 1, 1, 16),
        (15,),
        (16, 0),
        (40, 16),
    ]
    kinds = ["f8", "f4", "f2", ">f8", ">f4", "i4", "u1", "?", "c8", "U3", "O", "M8[s]", "i8"]
    numbers = [0.0, 1.0, -1.5, 1e300, 1e-310, float("nan"), float("inf"), 65504.0]

    def array() -> np.ndarray:
        made = np.random.default_rng(chance.randrange(2**31)).normal(size=chance.choice(shapes))
        if made.size and chance.random() < 0.4:
            made.flat[chance.randrange(made.size)] = chance.choice(numbers)
        with np.errstate(all="ignore"):
            return (made * (1 if chance.random() < 0.8 else 1e-200)).astype(chance.choice(kinds))

    file = io.BytesIO()
    if name.endswith(".npy"):
        np.save(file, array(), allow_pickle=True)
    else:
        names = chance.sample(["a", "b", "c", "=1", "a b " * 60, "x" * 300, "../a", "é\u202e", "a:b@1", "A", ""], 3)
        np.savez(file, allow_pickle=True, **{key: array() for key in names})
    return file.getvalue()


def _with_kind(changed: tuple[bytes, frozenset[str]], kind: str) -> tuple[bytes, str, frozenset[str]]:
    return changed[0], kind, changed[1]
