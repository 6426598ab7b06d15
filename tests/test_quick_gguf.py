"""Skipping the tokens of a GGUF file changes nothing else that is read from it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from headspan.running.fast_gguf import quick_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("llama.rope.dimension_sections", [3, 1, 2])
    writer.add_token_list([f"{'ä' * (i % 7)}{i}" for i in range(5000)])
    writer.add_token_scores([float(i) for i in range(5000)])
    writer.add_token_types([1] * 4096)  # as long as an array may be to be read whole
    writer.add_array("tokenizer.ggml.flags", [True] * 4097)
    writer.add_block_count(7)
    writer.add_tensor("blk.0.attn_q.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_but_long_arrays_is_as_it_was(path: Path) -> None:
    before, table = gguf.GGUFReader, gguf.get_tensor_name_map
    whole = before(path)
    with quick_gguf():
        quick = gguf.GGUFReader(path)
    assert gguf.GGUFReader is before and gguf.get_tensor_name_map is table
    long = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.flags"}
    assert list(quick.fields) == list(whole.fields)
    for name, field in whole.fields.items():
        assert quick.fields[name].types == field.types
        if name not in long:
            assert quick.fields[name].contents() == field.contents()
    tokens = quick.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == 5000 and tokens.contents(4999) == "0"
    assert quick.data_offset == whole.data_offset
    np.testing.assert_array_equal(quick.tensors[0].data, whole.tensors[0].data)


def test_other_threads_read_everything(path: Path) -> None:
    seen: list[str] = []
    with quick_gguf():
        reader = gguf.GGUFReader
        other = threading.Thread(
            target=lambda: seen.append(reader(path).fields["tokenizer.ggml.tokens"].contents(4999))
        )
        other.start()
        other.join()
    assert seen == ["ä4999"]


def test_a_failure_leaves_the_package_as_it_was() -> None:
    before = gguf.GGUFReader
    with pytest.raises(ZeroDivisionError), quick_gguf():
        raise ZeroDivisionError
    assert gguf.GGUFReader is before
