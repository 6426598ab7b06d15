"""Nodes from files and from Python: shapes, orientation, places in the stream, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.node_kinds.node_sets import stream_places
from headspan.node_kinds.opening import node_sets
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import EMBEDDING_POSITION, UNEMBEDDING_POSITION, Head, Role, forward_mask

D = 12


@pytest.fixture(scope="module")
def weights() -> hs.models.weights.AttentionWeights:  # type: ignore[name-defined]
    rng = np.random.default_rng(0)
    return hs.open({role: rng.normal(size=(5, 2, D, 3)) for role in "QKVO"})


def read(nodes, role=Role.R):
    return np.concatenate([block for _, block in nodes.blocks(role, 3)])


def saved(folder: Path, kind: str, arrays: dict[str, np.ndarray]) -> Path:
    path = folder / f"vectors.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    elif kind == "safetensors":
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, path)
    return path


@pytest.mark.parametrize("kind", ["npz", "safetensors", "pt", "bin"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_named_tensors_of_all_shapes(weights, tmp_path: Path, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    shapes = {"one": (D,), "rows": (7, D), "columns": (D, 5), "bases": (4, D, 2), "flat": (4, 2, D)}
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    path = saved(tmp_path, kind, arrays)
    sets = {found.name(0).partition("[")[0]: found for found in node_sets(weights, f"{path}@3")}
    expected = {
        "one": arrays["one"].reshape(1, D, 1),
        "rows": arrays["rows"][:, :, None],
        "columns": arrays["columns"].T[:, :, None],
        "bases": arrays["bases"],
        "flat": arrays["flat"].transpose(0, 2, 1),
    }
    assert set(sets) == set(expected)
    for name, array in expected.items():
        assert read(sets[name]).dtype == np.float32
        np.testing.assert_array_equal(read(sets[name]), array.astype(np.float32))
        np.testing.assert_array_equal(read(sets[name], Role.W), array.astype(np.float32))
        assert sets[name].width(Role.R) == array.shape[2]
        assert sets[name].kind == ("basis" if array.shape[2] > 1 else "direction")
    assert [str(node) for node in sets["columns"].nodes(Role.R)] == [f"columns[{i}]" for i in range(5)]
    (note,) = (note for found in sets.values() for note in found.notes)  # one for the file
    assert all(fact in note for fact in ("5 columns of 12", "7 rows of 12", "4 bases of 2 columns of 12"))
    assert "bases of 7" not in note
    (alone,) = node_sets(weights, f"{path}:rows@3")
    assert len(alone) == 7 and alone.find("ROWS[6]") == 6 and alone.find("rows[7]") is None


@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_numpy_file(weights, tmp_path: Path, order) -> None:
    vectors = np.asarray(np.random.default_rng(2).normal(size=(6, D)), order=order)
    np.save(tmp_path / "probe.npy", vectors)
    (nodes,) = node_sets(weights, tmp_path / "probe.npy")
    np.testing.assert_array_equal(read(nodes)[:, :, 0], vectors.astype(np.float32))
    assert nodes.name(2) == "probe[2]" and any("without a layer" in note for note in nodes.notes)
    np.save(tmp_path / " whole .npy", np.arange(D))  # whole numbers are numbers too
    (nodes,) = node_sets(weights, f"{tmp_path / ' whole .npy'}@0")
    assert nodes.name(0) == "whole" and read(nodes)[0, 3, 0] == 3


def test_one_tensor_alone_a_list_and_layer_numbers(weights, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, content in {
        "alone": torch.ones(D), "list": [torch.ones(D), torch.ones(2, D)], "layers": {3: torch.ones(D)},
    }.items():  # fmt: skip
        torch.save(content, tmp_path / f"{name}.pt")
    names = [[s.name(0) for s in node_sets(weights, tmp_path / f"{n}.pt")] for n in ("alone", "list", "layers")]
    assert names == [["alone"], ["0", "1[0]"], ["3"]]


def test_square_matrices_are_noted(weights, tmp_path: Path) -> None:
    np.save(tmp_path / "square.npy", np.random.default_rng(0).normal(size=(D, D)))
    (nodes,) = node_sets(weights, tmp_path / "square.npy")
    assert "12 rows of 12" in nodes.notes[0] and "could be columns" in nodes.notes[0]
    bases = np.random.default_rng(0).normal(size=(2, D, D)).astype(np.float32)
    np.save(tmp_path / "bases.npy", bases)
    (nodes,) = node_sets(weights, tmp_path / "bases.npy")
    assert "2 bases of 12 columns of 12" in nodes.notes[0] and "could be rows" in nodes.notes[0]
    np.testing.assert_array_equal(read(nodes), bases)


def test_file_names_with_marks_in_them(weights, tmp_path: Path) -> None:
    path = tmp_path / "a:b@3.npy"
    np.save(path, np.ones(D))
    assert node_sets(weights, str(path))[0].places[Role.R].position == UNEMBEDDING_POSITION
    assert node_sets(weights, f"{path}@2")[0].places[Role.R].position == 4


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_positions_of_a_direction_at_a_layer(weights, layer: int) -> None:
    """It reads what heads before the layer write; heads of the layer and after it read what it writes."""
    (nodes,) = node_sets(weights, hs.Node(np.ones(D), "u", layer))
    heads = [Head(i, 0) for i in range(5)]
    writers = forward_mask(heads, nodes.nodes(Role.R))[:, 0]
    readers = forward_mask(nodes.nodes(Role.W), heads)[0]
    assert writers.tolist() == [i < layer for i in range(5)]
    assert readers.tolist() == [i >= layer for i in range(5)]


@pytest.mark.parametrize("size", [0, 1, 2, 5, 100])
def test_blocks_of_any_size_hold_every_node_once(weights, tmp_path: Path, size: int) -> None:
    vectors = np.random.default_rng(3).normal(size=(5, D)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    blocks = list(node_sets(weights, f"{tmp_path}/v.npy@1")[0].blocks(Role.W, size))
    assert [i for part, _ in blocks for i in range(5)[part]] == [0, 1, 2, 3, 4]
    assert max(len(block) for _, block in blocks) == min(max(size, 1), 5)
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks])[:, :, 0], vectors)


def test_positions_without_a_layer(weights) -> None:
    (nodes,) = node_sets(weights, hs.Node(np.ones(D), "u"))
    assert nodes.places == {Role.R: (UNEMBEDDING_POSITION, 5), Role.W: (EMBEDDING_POSITION, -1)}
    heads = [Head(i, 0) for i in range(5)]
    assert forward_mask(heads, nodes.nodes(Role.R)).all() and forward_mask(nodes.nodes(Role.W), heads).all()


def test_nodes_made_in_python(weights) -> None:
    torch = pytest.importorskip("torch")
    basis = torch.randn(D, 2, dtype=torch.bfloat16, requires_grad=True)
    first, second = node_sets(weights, [hs.Node(basis, "b", 1, writes=False), hs.Node(basis.T, "c", 1)])
    np.testing.assert_array_equal(read(first), read(second))
    assert first.kind == "basis" and first.width(Role.R) == 2 and not first.nodes(Role.W)
    assert list(first.blocks(Role.W, 5)) == []
    rows = first.nodes(Role.R)[0], second.nodes(Role.R)[0], second.nodes(Role.W)[0]
    assert [(row.name, row.reads, row.writes) for row in rows] == [
        ("b", True, False),
        ("c", True, True),
        ("c", True, True),
    ]


def test_numbers_too_large_or_small_for_float32_keep_their_direction(weights, tmp_path: Path) -> None:
    direction = np.random.default_rng(0).normal(size=D)
    for scale in (1e-200, 1e-30, 1e30, 1e200):
        (nodes,) = node_sets(weights, hs.Node(direction * scale, "u", 1))
        found = read(nodes)[0, :, 0].astype(np.float64)
        np.testing.assert_allclose(found / np.linalg.norm(found), direction / np.linalg.norm(direction), rtol=1e-6)
    np.save(tmp_path / "v.npy", np.outer([1e-200, 1, 1e200], direction))  # beside others of a usual size too
    for found in read(node_sets(weights, tmp_path / "v.npy")[0])[:, :, 0].astype(np.float64):
        np.testing.assert_allclose(found / np.linalg.norm(found), direction / np.linalg.norm(direction), rtol=1e-6)


def test_folded_layer_norm_centres_what_is_written() -> None:
    rng = np.random.default_rng(0)
    model = {**{role: rng.normal(size=(2, 2, D, 3)) for role in "QKVO"}, "norm": "layer"}
    (nodes,) = node_sets(hs.fold(hs.open(model)), hs.Node(np.arange(D), "u", 1))
    assert abs(read(nodes, Role.W).mean()) < 1e-6 and read(nodes, Role.R).mean() == pytest.approx((D - 1) / 2)


WRONG = {
    "width": (np.ones(D + 1), "no axis of d_model 12"),
    "matrix": (np.ones((4, D + 1)), "no axis of d_model 12"),
    "empty": (np.ones((0, D)), "has shape"),
    "axes": (np.ones((2, 2, 2, D)), "has shape"),
    "number": (np.float64(3), "has shape"),
    "zero": (np.zeros(D), "is zero"),
    "one zero": (np.vstack([np.ones((4, D)), np.zeros((1, D))]), r"one zero\[4\].*is zero"),
    "nan": (np.full(D, np.nan), "NaN or infinite"),
    "one nan": (np.vstack([np.ones((4, D)), np.full((1, D), np.nan)]), r"one nan\[4\].*NaN or infinite"),
    "infinite": (np.full((2, D), np.inf), "NaN or infinite"),
    "text": (np.array(["a"] * D), "not real numbers"),
    "complex": (np.ones(D, complex), "not real numbers"),
    "L4H7": (np.ones(D), "names a head"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_a_direction_is_refused(weights, tmp_path: Path, name: str) -> None:
    array, sentence = WRONG[name]
    np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(HeadspanError, match=sentence):
        [read(found) for found in node_sets(weights, tmp_path / f"{name}.npy")]


def test_objects_are_never_unpickled(weights, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    np.save(tmp_path / "objects.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", a=np.array([Bomb()], dtype=object))
    for path in tmp_path.glob("objects.*"):
        with pytest.raises(HeadspanError, match="Python objects"):
            node_sets(weights, path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".txt"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00\xff\xff", b"\x80\x04garbage", b"x" * 99])
def test_damaged_files_are_refused_with_a_message(weights, tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(content)
    with pytest.raises(HeadspanError):
        node_sets(weights, path)


def test_missing_files_names_and_layers(weights, tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", a=np.ones(D))
    np.save(tmp_path / "v.npy", np.ones(D))
    np.savez(tmp_path / "none.npz")
    for text, sentence in {
        f"{tmp_path}/nothing.npy": "no such file",
        f"{tmp_path}/v.npz:b": "no array named 'b': it holds a",
        f"{tmp_path}/v.npy:b": "one array without a name",
        f"{tmp_path}/v.npy@6": "has the layers 0 to 4",
        f"{tmp_path}/none.npz": "no arrays",
        f"{tmp_path}": "is a directory",
        "": "not a file of vectors",
    }.items():
        with pytest.raises(HeadspanError, match=sentence):
            node_sets(weights, text)
    with pytest.raises(HeadspanError, match="two nodes are named A"):
        node_sets(weights, [f"{tmp_path}/v.npz", hs.Node(np.ones(D), "A", 1)])
    with pytest.raises(HeadspanError, match="is not a node"):
        node_sets(weights, [np.ones(D)])


@pytest.mark.parametrize("layer", [True, False, 1.5, 2.0, "1", -1, 6])
def test_layers_that_a_model_does_not_have(weights, layer: Any) -> None:
    with pytest.raises(HeadspanError, match="layers 0 to 4"):
        stream_places(layer, weights)
    assert stream_places(np.int64(5), weights)[Role.R].layer == 5  # after the last


def test_wrong_nodes_in_python() -> None:
    for wrong in (
        {"basis": [1.0, 2.0]}, {"basis": np.ones((2, 2, 2))}, {"basis": np.ones(0)}, {"name": ""}, {"name": 3},
        {"name": "L1KV2"}, {"layer": -1}, {"layer": 1.5}, {"layer": True}, {"reads": "yes"},
        {"reads": False, "writes": False}, {"basis": np.array(["a"])},
    ):  # fmt: skip
        with pytest.raises(HeadspanError):
            hs.Node(**{"basis": np.ones(D), **wrong})


def test_many_vectors_need_little_memory(weights, tmp_path: Path) -> None:
    """A file far larger than a block is mapped, not read, in both orientations; its names are created lazily."""
    count = 200_000
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (count, D))
    rows[:] = 1
    columns = np.lib.format.open_memmap(tmp_path / "columns.npy", "w+", np.float32, (D, count))
    columns[:] = 1
    import tracemalloc

    tracemalloc.start()
    sets = node_sets(weights, [f"{tmp_path}/rows.npy@1", f"{tmp_path}/columns.npy@1"])
    for nodes in sets:
        for _, block in nodes.blocks(Role.R, 4096):
            assert block.shape[1:] == (D, 1)
    assert sets[1].nodes(Role.R)[count - 1].name == f"columns[{count - 1}]"
    assert tracemalloc.get_traced_memory()[1] < count * D * 4 / 4
    tracemalloc.stop()
    with pytest.raises(HeadspanError, match="name their nodes the same"):
        node_sets(weights, [f"{tmp_path}/rows.npy@1", f"{tmp_path}/rows.npy@2"])
