"""Broken or hostile checkpoints: each is refused with one message, as a HeadspanError."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headspan.checkpoints.opening import open_source
from headspan.vocabulary.errors import HeadspanError

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}
MUTATIONS = int(os.environ.get("HEADSPAN_FUZZ_CASES", "300"))


def refusal(reference: object) -> str:
    """Open a reference and read everything in it; return the message of the refusal."""
    with pytest.raises(HeadspanError) as caught:
        read_all(reference)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 1000
    return sentence


def read_all(reference: object) -> None:
    source = open_source(reference)
    for name in list(source.names()):
        source.read(name)
    source.fingerprint()


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def good(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    save_file({"x": np.ones((4, 8), np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "it is empty"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "header should have"),
    "header larger than file": (safetensors_bytes(b"{}", length=10**6), "header should have 1000000 bytes"),
    "header of 2**63": (safetensors_bytes(b"{}", length=2**63), "header should have"),
    "not JSON": (safetensors_bytes(b"{nope"), "not JSON"),
    "not UTF-8": (safetensors_bytes(b"\xff\xfe"), "not JSON"),
    "not an object": (safetensors_bytes([1]), "not a JSON object"),
    "deeply nested": (safetensors_bytes(b"[" * 100_000), "not JSON"),
    "endless number": (safetensors_bytes(b'{"x": ' + b"9" * 10_000 + b"}"), "not JSON"),
    "duplicate key": (safetensors_bytes(b'{"x": 1, "x": 2}'), "occurs twice"),
    "entry is a list": (safetensors_bytes({"x": [1]}), "data_offsets"),
    "no offsets": (safetensors_bytes({"x": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
    "offsets turned round": (safetensors_bytes({"x": entry(offsets=[8, 0])}, bytes(8)), "data_offsets"),
    "negative offset": (safetensors_bytes({"x": entry(offsets=[-8, 0])}, bytes(8)), "data_offsets"),
    "float offset": (safetensors_bytes({"x": entry(offsets=[0, 8.0])}, bytes(8)), "data_offsets"),
    "boolean offset": (safetensors_bytes({"x": entry(offsets=[False, 8])}, bytes(8)), "data_offsets"),
    "huge offset": (safetensors_bytes({"x": entry(offsets=[0, 2**80])}, bytes(8)), "data_offsets"),
    "truncated": (safetensors_bytes({"x": entry([4], [0, 16])}, bytes(8)), "truncated"),
    "trailing bytes": (safetensors_bytes({"x": entry()}, bytes(80)), "describes 8 bytes"),
    "overlap": (safetensors_bytes({"x": entry(), "y": entry()}, bytes(8)), "starts at byte 0"),
    "gap": (safetensors_bytes({"x": entry(offsets=[8, 16])}, bytes(16)), "starts at byte 8"),
    "unknown dtype": (safetensors_bytes({"x": entry(dtype="F31")}, bytes(8)), "unknown number type"),
    "dtype is a list": (safetensors_bytes({"x": entry(dtype=["F32"])}, bytes(8)), "unknown number type"),
    "shape too large": (safetensors_bytes({"x": entry([2**40])}, bytes(8)), "8 bytes"),
    "shape overflows": (safetensors_bytes({"x": entry([2**62, 4])}, bytes(8)), "8 bytes"),
    "shape is text": (safetensors_bytes({"x": entry("two")}, bytes(8)), "invalid shape"),
    "negative shape": (safetensors_bytes({"x": entry([-1, -2])}, bytes(8)), "invalid shape"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_bad_safetensors(tmp_path, name):
    content, words = HEADERS[name]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert words in refusal(tmp_path)
    assert words in refusal(tmp_path / "model.safetensors")


def index(**weight_map: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(content) and None


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return change


def become_pipe(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty directory": (lambda path: [file.unlink() for file in path.iterdir()], "holds no weights"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "holds no weights"),
    "config is not JSON": (replace("config.json", b"{"), "not valid JSON"),
    "config is a list": (replace("config.json", b"[]"), "should hold a JSON object"),
    "config is deeply nested": (replace("config.json", b'{"a":' * 100_000), "not valid JSON"),
    "config is not text": (replace("config.json", b"\x80\xff"), "not valid JSON"),
    "config is a pipe": (become_pipe, "not an ordinary file"),
    "weights are a directory": (
        lambda path: ((path / "model.safetensors").unlink(), (path / "model.safetensors").mkdir()),
        "not an ordinary file",
    ),
    "shard is missing": (index(x="model-1.safetensors"), "no such file"),
    "index leads up": (index(x="../../x.safetensors"), "outside the directory"),
    "index leads up inside": (index(x="a/../../x.safetensors"), "outside the directory"),
    "index is absolute": (index(x="/etc/passwd"), "outside the directory"),
    "index has a drive": (index(x="C:x.safetensors"), "outside the directory"),
    "index has backslashes": (index(x="..\\..\\x.safetensors"), "outside the directory"),
    "index has a zero byte": (index(x="a\0.safetensors"), "not a file name"),
    "index names no weight file": (index(x="config.json"), "not a weight file"),
    "index names a number": (index(x=3), "not all file names"),
    "index is empty": (index(), "no weight_map"),
    "two models": (
        lambda path: [(path / "model.safetensors").rename(path / "a.safetensors"),
                      (path / "b.safetensors").write_bytes(b"")],
        "several models",
    ),
    "link out of the directory": (link("model.safetensors", "../outside/model.safetensors"), "outside its directory"),
    "config links out": (link("config.json", "../outside/config.json"), "outside its directory"),
    "link in a circle": (link("model.safetensors", "model.safetensors"), "model.safetensors"),
    "dangling link": (link("model.safetensors", "nowhere"), "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_bad_directories(tmp_path, name):
    good(tmp_path / "outside")
    path = good(tmp_path / "model")
    read_all(path)
    change, words = DIRECTORIES[name]
    change(path)
    assert words in refusal(path)


def test_index_to_a_tensor_that_is_not_there(tmp_path):
    path = good(tmp_path)
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": {"y": "model-1.safetensors"}}))
    assert all(fact in refusal(path) for fact in ("'y'", "model-1.safetensors"))


def test_link_from_a_cache_to_elsewhere_is_refused(tmp_path):
    good(tmp_path / "outside")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../../outside/{name}")
    assert "outside its directory" in refusal(snapshot)


def test_unreadable_file():
    me, nobody = os.geteuid(), 65534
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in folders that only their owner may enter
        path = good(Path(folder) / "model")
        (path / "model.safetensors").chmod(0)
        Path(folder).chmod(0o755)
        try:
            if me == 0:  # root may read everything
                os.seteuid(nobody)
            assert "permission denied" in refusal(path)
        finally:
            os.seteuid(me)


@pytest.mark.parametrize("text", ["", " ", "\0", "/nonexistent/model", "./nope", "no such model!", "nope.gguf"])
def test_references_to_nothing(text):
    refusal(text)


def test_missing_path_is_reported_as_missing(tmp_path):
    assert "no such file or directory" in refusal(str(tmp_path / "nope"))
    assert "no such file or directory" in refusal(tmp_path / "nope")


def test_files_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a model" in refusal(tmp_path / "notes.txt")


def test_sparse_file_of_terabytes_is_refused_before_allocation(tmp_path):
    size = 2**42
    raw = safetensors_bytes({"x": entry([2**20, 2**20], [0, size])})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + size)
    (tmp_path / "config.json").write_text("{}")
    assert "more than the" in refusal(tmp_path)


# PyTorch files


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.path}",))


class Evaluate(Touch):
    def __reduce__(self) -> tuple:
        return (eval, (f"open({str(self.path)!r}, 'w')",))


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def torch_zip(pickled: bytes, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for name, content in entries.items():
            archive.writestr(f"archive/data/{name}", content)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["pytorch_model.bin", "m.pth", "m.pt"])
@pytest.mark.parametrize("kind", [Touch, Evaluate])
@pytest.mark.parametrize("form", ["pickle", "zip", "old", "new"])
@pytest.mark.parametrize("forced", [False, True])
def test_code_in_a_pickle_is_never_run(torch, tmp_path, monkeypatch, suffix, kind, form, forced):
    if forced:  # torch's own switch to the dangerous loader must not reach us
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    proof, path = tmp_path / "proof", tmp_path / "model" / suffix
    path.parent.mkdir()
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    content = {"x": torch.ones(2), "bad": kind(proof)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(kind(proof), protocol=2))
    elif form == "zip":
        path.write_bytes(torch_zip(pickle.dumps(kind(proof), protocol=2)))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "new")
    assert "was not loaded" in refusal(path.parent)
    assert "weights_only" not in refusal(path)
    assert not proof.exists()


def test_the_trap_itself_works(tmp_path):
    """The pickles above would do harm if they were loaded carelessly."""
    pickle.loads(pickle.dumps(Touch(tmp_path / "proof"), protocol=2))
    assert (tmp_path / "proof").exists()


def torch_file(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    return tmp_path


def test_zip_bomb_is_refused(torch, tmp_path):
    bomb = torch_zip(pickle.dumps({}), zipfile.ZIP_DEFLATED, **{"0": bytes(50_000_000)})
    assert len(bomb) < 100_000
    assert "compressed or overlapping" in refusal(torch_file(tmp_path, bomb))


def test_zip_whose_entries_claim_too_much_is_refused(torch, tmp_path):
    content = bytearray(torch_zip(pickle.dumps({}), **{"0": bytes(64)}))
    record = content.rindex(b"PK\1\2")
    content[record + 20 : record + 28] = struct.pack("<II", 2**31, 2**31)
    refusal(torch_file(tmp_path, bytes(content)))


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80\x02", b"hello" * 100, b"PK\5\6" + bytes(18)])
def test_files_that_are_not_torch_files(torch, tmp_path, content):
    refusal(torch_file(tmp_path, content))


def test_truncated_torch_file(torch, tmp_path):
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(1000)}, buffer)
    refusal(torch_file(tmp_path, buffer.getvalue()[:2000]))


def test_a_zip_on_several_disks_is_refused(torch, tmp_path):
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(10)}, buffer)
    content = bytearray(buffer.getvalue())
    locator = content.rindex(b"PK\6\7")
    content[locator + 16 : locator + 20] = struct.pack("<I", 2)
    assert "damaged zip file" in refusal(torch_file(tmp_path, bytes(content)))


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, {"x": {"y": 1}}])
def test_torch_files_without_tensors(torch, tmp_path, content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    assert "no named tensors" in refusal(torch_file(tmp_path, buffer.getvalue()))


def test_strides_of_zero_make_no_terabytes(torch, tmp_path):
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(1).expand(2**20, 2**20)}, buffer)
    assert "more than the file can hold" in refusal(torch_file(tmp_path, buffer.getvalue()))


# GGUF files


def gguf_bytes(pairs: list[bytes] = (), tensors: list[bytes] = (), data: bytes = b"", version: int = 3) -> bytes:  # type: ignore[assignment]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


ARCHITECTURE = pair("general.architecture", 8, text("llama"))
QUERY = "blk.0.attn_q.weight"
HEADS = pair("llama.attention.head_count", 4, struct.pack("<I", 2))


def many(count: int, kind: int) -> bytes:
    return pair("list", 9, struct.pack("<IQ", kind, count))


GGUF: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "cannot be read"),
    "not GGUF": (b"GGML" + bytes(100), "does not start with GGUF"),
    "only the magic": (b"GGUF", "in the middle of its header"),
    "version 1": (gguf_bytes([ARCHITECTURE], version=1), "version 1"),
    "other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no architecture": (gguf_bytes([]), "general.architecture is missing"),
    "architecture is a number": (gguf_bytes([pair("general.architecture", 4, bytes(4))]), "is missing"),
    "key twice": (gguf_bytes([ARCHITECTURE, ARCHITECTURE]), "occurs twice"),
    "endless array": (gguf_bytes([ARCHITECTURE, many(2**60, 4)]), "in the middle"),
    "endless array of texts": (gguf_bytes([ARCHITECTURE, many(2**60, 8)]), "claims"),
    "endless array of arrays": (gguf_bytes([ARCHITECTURE, many(2**60, 9)]), "claims"),
    "unknown type": (gguf_bytes([ARCHITECTURE, pair("a", 99, b"")]), "unknown type 99"),
    "endless text": (gguf_bytes([ARCHITECTURE, pair("a", 8, struct.pack("<Q", 2**63))]), "in the middle"),
    "endless pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "in the middle"),
    "endless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "in the middle"),
    "alignment 0": (gguf_bytes([ARCHITECTURE, pair("general.alignment", 4, bytes(4))]), "alignment"),
    "truncated": (gguf_bytes([ARCHITECTURE], [tensor("x", [64])], bytes(8)), "truncated"),
    "terabytes": (gguf_bytes([ARCHITECTURE], [tensor("x", [2**21, 2**21])], bytes(8)), "truncated"),
    "overflowing shape": (gguf_bytes([ARCHITECTURE], [tensor("x", [2**40, 2**40])]), "impossible shape"),
    "no columns": (gguf_bytes([ARCHITECTURE, HEADS], [tensor(QUERY, [0, 2**39])]), "impossible shape"),
    "nine dimensions": (gguf_bytes([ARCHITECTURE], [tensor("x", [1] * 9)], bytes(4)), "9 dimensions"),
    "tensor twice": (gguf_bytes([ARCHITECTURE], [tensor("x", [2])] * 2, bytes(8)), "same name"),
    "overlap": (gguf_bytes([ARCHITECTURE], [tensor("x", [2]), tensor("y", [2])], bytes(8)), "overlaps"),
    "unknown quantisation": (gguf_bytes([ARCHITECTURE], [tensor("x", [2], 999)], bytes(8)), "unknown quantisation"),
    "broken block": (gguf_bytes([ARCHITECTURE], [tensor("x", [33], 8)], bytes(64)), "not in blocks of 32"),
    "no heads": (gguf_bytes([ARCHITECTURE], [tensor(QUERY, [2, 4])], bytes(32)), "how many heads"),
    "rows do not fit": (gguf_bytes([ARCHITECTURE, HEADS], [tensor(QUERY, [2, 3])], bytes(32)), "not a multiple"),
    "part of several": (gguf_bytes([ARCHITECTURE, pair("split.count", 2, struct.pack("<H", 3))]), "one part"),
}


@pytest.mark.parametrize("name", GGUF)
def test_bad_gguf(tmp_path, name):
    pytest.importorskip("gguf")
    content, words = GGUF[name]
    (tmp_path / "m.gguf").write_bytes(content)
    assert words in refusal(tmp_path / "m.gguf")


def test_gguf_scalar_under_the_name_of_a_weight(tmp_path):
    pytest.importorskip("gguf")
    for name in (QUERY, "blk.0.attn_qkv.weight"):
        (tmp_path / "m.gguf").write_bytes(gguf_bytes([ARCHITECTURE, HEADS], [tensor(name, [])], bytes(4)))
        source = open_source(tmp_path / "m.gguf")
        assert [source.read(found).shape for found in source.names()] == [()]


# Random damage


def seeds(tmp_path: Path) -> dict[str, bytes]:
    """Small valid files of each kind."""
    good(tmp_path / "seed")
    found = {
        "model.safetensors": (tmp_path / "seed" / "model.safetensors").read_bytes(),
        "m.gguf": gguf_bytes([ARCHITECTURE, HEADS, pair("list", 9, struct.pack("<IQ", 4, 3) + bytes(12))],
                             [tensor(QUERY, [8, 4]), tensor("x", [32, 2], 8, 128)], bytes(300)),
    }  # fmt: skip
    try:
        import torch
    except ImportError:
        return found
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(4, 4), "y": torch.zeros(3).half()}, buffer)
    return found | {"pytorch_model.bin": buffer.getvalue()}


def damage(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = min(int(chance.expovariate(1 / 120)), len(changed) - 1)  # headers more often than bodies
        kind = chance.randrange(5)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[place] = chance.choice(b'\0\1\x7f\xff09-[{"')
        elif kind == 2:
            del changed[place : place + chance.randint(1, 9)]
        elif kind == 3:
            changed[place:place] = chance.randbytes(chance.randint(1, 9))
        else:
            changed[place : place + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
    return bytes(changed[: chance.randint(0, len(changed))]) if chance.random() < 0.1 else bytes(changed)


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf", "pytorch_model.bin"])
def test_random_damage_gives_an_answer_or_a_message(tmp_path, name):
    """No other exception, whatever the bytes: HEADSPAN_FUZZ_CASES sets how many files are tried."""
    found = seeds(tmp_path)
    if name not in found:
        pytest.skip("torch is not installed")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, chance = tmp_path / name, random.Random(name)
    path.write_bytes(found[name])
    read_all(path)
    sentences = []
    for _ in range(MUTATIONS):
        path.write_bytes(damage(found[name], chance))
        try:
            read_all(path)
        except HeadspanError as error:
            sentences.append(str(error))
    assert len(sentences) > MUTATIONS // 4
    assert not [sentence for sentence in sentences if "\n" in sentence]


def test_damaged_safetensors_are_never_read_differently_from_the_package(tmp_path):
    """Where headspan reads a damaged file, the safetensors package reads the same numbers."""
    from safetensors import safe_open

    found = seeds(tmp_path)["model.safetensors"]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, chance, agreed = tmp_path / "model.safetensors", random.Random(5), 0
    for _ in range(MUTATIONS):
        path.write_bytes(damage(found, chance))
        try:
            source = open_source(path)
            ours = {name: source.read(name) for name in source.names()}
        except HeadspanError:
            continue
        with safe_open(path, framework="numpy") as theirs:
            assert set(theirs.keys()) == set(ours)
            for name, array in ours.items():
                np.testing.assert_array_equal(array, theirs.get_tensor(name).astype(array.dtype))
        agreed += 1
    assert agreed > 0


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit on memory here")
@pytest.mark.parametrize("name", ["terabytes", "endless array", "overflowing shape"])
def test_hostile_sizes_need_no_memory(tmp_path, name):
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(GGUF[name][0])
    code = (
        "import resource, sys; from headspan.checkpoints.opening import open_source; import gguf\n"
        "from headspan.vocabulary.errors import HeadspanError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "try: open_source(sys.argv[1])\n"
        "except HeadspanError: print('refused')"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.gguf")], capture_output=True, text=True)
    assert result.stdout.strip() == "refused", result.stderr


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_file_cut_off_after_it_was_opened(torch, tmp_path, zipped):
    """A mapped file that becomes shorter would kill the process; here it is an error."""
    path = tmp_path / "m.pth"
    tensors = {f"w{i}": torch.ones(300, 300) for i in range(4)}
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    code = f"""
import os
from pathlib import Path
from headspan.vocabulary.errors import HeadspanError
from headspan.checkpoints.torch_file import TorchFile
path = Path({str(path)!r})
file = TorchFile(path)
os.truncate(path, 5000)
for use in (file.read, file.hash):
    try:
        use("w3")
        print("read")
    except HeadspanError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("changed while it was in use") == 2
