"""What changed between two models: planted changes are found with their size, and rounding is not a change."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

import headspan as hs
from headspan.change.diff import PortDrift
from headspan.cli import _run, app
from headspan.models.rounded import rounding_steps
from headspan.subspaces.bases import orthonormal_basis
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role

Arrays = dict[str, Any]


def random_model(seed: int = 0, layers: int = 3, heads: int = 4, kv: int | None = None, d: int = 48, m: int = 6,
                 condition: float = 10.0) -> Arrays:  # fmt: skip
    """Weights whose singular values spread as those of real heads do."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(1.0, 1 / condition, m)
    arrays: Arrays = {}
    for role in "QKVO":
        shape = (layers, (kv or heads) if role in "KV" else heads)
        turns = np.linalg.qr(rng.normal(size=(*shape, m, m)))[0]
        arrays[role] = ((rng.normal(size=(*shape, d, m)) * spread) @ turns).astype(np.float32)
    return arrays


def with_norm(arrays: Arrays, kind: str, seed: int = 5) -> Arrays:
    layers, _, d, _ = arrays["Q"].shape
    gain = np.exp(np.random.default_rng(seed).normal(0, 0.5, size=(layers, d))).astype(np.float32)
    return {**arrays, "norm": kind, "gain": gain}


def rounded(arrays: Arrays, dtype: Any, times: int = 1) -> Arrays:
    """Every number moved by its rounding error, once or several times."""

    def move(value: Any) -> Any:
        return value if isinstance(value, str) else value + times * (value.astype(dtype).astype(np.float32) - value)

    moved = {name: move(value) for name, value in arrays.items()}
    return {k: v if isinstance(v, str) else v.astype(dtype) for k, v in moved.items()} if times == 1 else moved


@pytest.mark.parametrize("degrees", [0.001, 0.5, 20.0, 45.0, 80.0, 90.0])
def test_planted_rotations_are_recovered(degrees: float) -> None:
    base = random_model(layers=2)
    other = {role: array.astype(np.float64).copy() for role, array in base.items()}
    planted = {("K", 1, 2), ("O", 0, 3)}
    rng = np.random.default_rng(1)
    for role, layer, head in planted:
        weight = other[role][layer, head]
        basis = orthonormal_basis(weight).vectors
        outside = rng.normal(size=len(weight))
        outside -= basis @ (basis.T @ outside)
        outside /= np.linalg.norm(outside)
        angle, first = math.radians(degrees), basis[:, 0].copy()
        turned = math.cos(angle) * first + math.sin(angle) * outside
        other[role][layer, head] = weight + np.outer(turned - first, first @ weight)
    change = hs.diff(base, other)
    for line in change.drift:
        if (str(line.role), line.head.layer, line.head.index) in planted:
            assert line.angle == pytest.approx(degrees, rel=1e-4)
            assert line.drift == pytest.approx(math.sin(math.radians(degrees)) ** 2 / 6, rel=1e-4)
            assert line.moved
        else:
            assert line.drift < 1e-20 and not line.moved
    assert {f"{p.role}{p.head}" for p in change.top(2)} == {"KL1H2", "OL0H3"}
    assert change.of("L1H2.K").drift > 0


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_another_basis_inside_each_head_is_not_a_change(norm: str | None) -> None:
    base = random_model(kv=2) if norm is None else with_norm(random_model(), norm)
    rng = np.random.default_rng(2)
    other = dict(base)
    for role in "QKVO":
        # Any invertible map of the columns, which the partner weight would undo in a running model.
        maps = rng.normal(size=(*base[role].shape[:2], 6, 6)) + 3 * np.eye(6)
        other[role] = base[role].astype(np.float64) @ maps
    change = hs.diff(base, other, fold=norm is not None)
    assert max(line.drift for line in change.drift) < 1e-10
    assert all(edge.kind in ("strengthened", "weakened") and abs(edge.change) < 1e-4 for edge in change.edges)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("condition", [2.0, 30.0])
@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_rounding_stays_under_the_floor_and_twice_that_does_not(dtype: Any, condition: float, norm: str | None) -> None:
    base = random_model(seed=3, layers=2, d=96, condition=condition)
    base = base if norm is None else with_norm(base, norm)
    fold = norm is not None
    once = hs.diff(base, rounded(base, dtype), fold=fold)
    twice = hs.diff(base, rounded(base, dtype, times=2), fold=fold)
    below = [line.drift / line.floor for line in once.drift]
    assert max(below) < 1 and np.mean(below) > 0.4  # the floor is near, not far above
    assert not any(line.moved for line in once.drift)
    floors = {(line.head, line.role): line.floor for line in once.drift}
    assert min(line.drift / floors[line.head, line.role] for line in twice.drift) > 1


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("queries", [40, None], ids=["query-latent", "dense-query"])
@pytest.mark.parametrize("fold", [False, True], ids=["raw", "folded"])
def test_the_same_for_products_of_a_latent(kind: str, queries: int | None, fold: bool) -> None:
    """Rounding every stored factor (matrices and the gains between them) stays under the floor of their product."""
    torch = pytest.importorskip("torch")
    from families import LATENT, build

    sizes = {"hidden_size": 96, "q_lora_rank": queries, "kv_lora_rank": 40, "qk_nope_head_dim": 12,
             "qk_rope_head_dim": 8, "v_head_dim": 10}  # fmt: skip
    model = build(replace(LATENT["deepseek_v3"], config=LATENT["deepseek_v3"].config | sizes))
    dtype, config = getattr(torch, kind), model.config.to_dict()
    base = {name: value.clone() for name, value in model.state_dict().items() if "experts" not in name}
    errors = {name: value.to(dtype).to(torch.float32) - value for name, value in base.items()}
    once = hs.diff((base, config), ({n: v.to(dtype) for n, v in base.items()}, config), fold=fold)
    twice = hs.diff((base, config), ({n: v + 2 * errors[n] for n, v in base.items()}, config), fold=fold)
    below = {f"{line.head}.{line.role}": line.drift / line.floor for line in once.drift}
    assert {"L0H0.Q", "L1H3.K", "L1KR.K", "L0H2.V"} <= set(below)
    assert max(below.values()) < 1 and np.mean(list(below.values())) > 0.4
    assert not any(line.moved for line in once.drift)
    floors = {(line.head, line.role): line.floor for line in once.drift}
    assert min(line.drift / floors[line.head, line.role] for line in twice.drift) > 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("role", [Role.K, Role.O])
def test_steps_of_quantisation_are_that_of_the_gguf_package(kind: str, role: Role) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf import quants

    weights = np.random.default_rng(4).normal(size=(2, 64, 32)).astype(np.float32)
    n, d, m = weights.shape
    rows = weights.transpose(1, 0, 2).reshape(d, n * m) if role is Role.O else weights.transpose(0, 2, 1).reshape(-1, d)
    stored = quants.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    back = quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    read = back.reshape(d, n, m).transpose(1, 0, 2) if role is Role.O else back.reshape(n, m, d).transpose(0, 2, 1)
    expected = rounding_steps(read, kind, role)
    assert expected is not None
    assert np.mean(np.square(read - weights)) == pytest.approx(np.square(expected).mean() / 12, rel=0.15)


def test_a_format_without_a_known_step_has_no_floor() -> None:
    assert rounding_steps(np.ones((1, 32, 32)), "IQ2_XS", Role.Q) is None


def test_edges_and_hubs_that_came_and_went() -> None:
    base = random_model(seed=6, layers=3, heads=4)
    other = {role: array.copy() for role, array in base.items()}
    before = hs.score(hs.open(base), "pk", "OK")["pk", "OK"].forward()
    i, j = np.unravel_index(np.nanargmin(before.values), before.values.shape)  # the weakest edge becomes the strongest
    source, target = before.sources[i], before.targets[j]
    other["K"][target.layer, target.index] = base["O"][source.layer, source.index]
    other["K"][target.layer, target.index] += 0.01 * base["K"][target.layer, target.index]
    change = hs.diff(base, other, k=5)
    edge = next(e for e in change.edges if e.kind == "entered" and e.rank_after == 1)
    assert (edge.source, edge.target) == (source, target)
    after = hs.score(hs.open(other), "pk", "OK")["pk", "OK"].forward()
    assert edge.before == pytest.approx(before.at(source, target), abs=1e-5)
    assert edge.after == pytest.approx(after.at(source, target), abs=1e-5) and edge.after > 5.5
    assert edge.rank_before == before.rank_of(source, target) == len(before.pairs()[2])
    assert edge.change == pytest.approx(edge.after - edge.before)
    assert {str(edge.pairing) for edge in change.edges} == {"OK"}
    left = {(str(e.source), str(e.target)) for e in change.edges if e.kind == "left"}
    tops = [{(str(e.source), str(e.target)) for e in m.top(5)} for m in (before, after)]
    assert left == tops[0] - tops[1]
    assert all(e.target == edge.target for e in change.edges if e.kind in ("strengthened", "weakened"))
    rose = [h for h in change.hubs if h.kind == "rank up" and h.hub == "inlet" and h.head == target]
    assert rose and rose[0].rank_after < rose[0].rank_before
    assert {h.pairing for h in change.hubs} == {edge.pairing}


def test_every_kind_of_edge_and_hub_against_plain_lists() -> None:
    """One head that reads and one that writes move a little; L0H0 writes nothing, so that no edge of it changes."""
    base = random_model(seed=8, layers=3, heads=3)
    base["O"][0, 0] = 0
    other, rng, k = {role: array.copy() for role, array in base.items()}, np.random.default_rng(1), 2
    for role, layer, head in (("K", 2, 1), ("K", 1, 0), ("O", 0, 2)):
        other[role][layer, head] += 0.5 * rng.normal(size=(48, 6)).astype(np.float32)
    change = hs.diff(base, other, k=k)
    scores = [hs.score(hs.open(model), "pk", "flow") for model in (base, other)]
    before, after = ({(e.source, e.target): e.score for e in s["pk", "OK"].forward().top(999)} for s in scores)
    ranks = [{pair: place for place, pair in enumerate(found, start=1)} for found in (before, after)]
    assert len(before) == len(after) == 27
    tops = [{pair for pair, rank in found.items() if rank <= k} for found in ranks]
    moved = {pair for pair in before if (str(pair[0]) == "L0H2" or str(pair[1]) in ("L2H1", "L1H0"))}
    rest = [pair for pair in moved if (pair in tops[0]) == (pair in tops[1])]
    by_change = sorted(rest, key=lambda pair: after[pair] - before[pair])
    expected = {
        "entered": sorted(tops[1] - tops[0], key=lambda pair: ranks[1][pair]),
        "left": sorted(tops[0] - tops[1], key=lambda pair: ranks[0][pair]),
        "strengthened": [pair for pair in by_change[::-1] if after[pair] > before[pair]],
        "weakened": [pair for pair in by_change if after[pair] < before[pair]],
    }
    assert expected["entered"] and min(map(len, (expected["strengthened"], expected["weakened"]))) > k
    listed = [edge for edge in change.edges if str(edge.pairing) == "OK"]
    assert [(e.kind, (e.source, e.target)) for e in listed] == [
        (kind, pair) for kind, pairs in expected.items() for pair in pairs[:k]
    ]
    for edge in listed:
        pair = edge.source, edge.target
        assert (edge.rank_before, edge.rank_after) == (ranks[0][pair], ranks[1][pair])
        assert (edge.before, edge.after) == (before[pair], after[pair])
        assert edge.change == pytest.approx(after[pair] - before[pair], rel=1e-6)
    whole = [e for e in hs.diff(base, other, k=27).edges if str(e.pairing) == "OK"]
    assert {(e.source, e.target) for e in whole} == {pair for pair in moved if before[pair] != after[pair]}
    assert any(e.rank_before == 1 for e in whole)  # the strongest too
    assert change.hubs
    for hub in change.hubs:
        old, new = (getattr(hs.hubs(s, hub.pairing), hub.hub) for s in scores)
        assert (hub.before, hub.after, hub.change) == (old.of(hub.head), new.of(hub.head), hub.after - hub.before)
        places = [1 + sum(found.of(head) > found.of(hub.head) for head in found.heads) for found in (old, new)]
        assert [hub.rank_before, hub.rank_after] == places
        assert hub.kind == ("rank up" if places[1] < places[0] else "rank down")


def test_models_with_another_number_of_layers_are_compared_where_they_can_be() -> None:
    base = random_model(layers=3)
    other = {role: array[:2] for role, array in base.items()}
    change = hs.diff(base, other)
    assert {line.head.layer for line in change.drift} == {0, 1}
    assert any("the 2 layers that both have" in note for note in change.notes)
    assert not change.edges and not any(line.moved for line in change.drift)
    back = hs.diff(other, base)
    assert [line[:3] for line in back.drift] == [
        (line.head, line.role, pytest.approx(0, abs=1e-20)) for line in change.drift
    ]


def test_other_vocabularies_are_noted() -> None:
    base = {**random_model(), "unembedding": np.ones((20, 48), np.float32)}
    other = {**base, "unembedding": np.ones((21, 48), np.float32)}
    assert any("vocabularies differ (20 and 21" in note for note in hs.diff(base, other).notes)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (random_model(d=40), "has d_model 48, arrays has 40"),
        (random_model(heads=8), "has n_heads 4, arrays has 8"),
        (random_model(kv=2), "has n_kv_heads 4, arrays has 2"),
        (random_model(m=5), "has d_head of Q 6, arrays has 5"),
    ],
)
def test_other_shapes_are_refused(other: Arrays, sentence: str) -> None:
    with pytest.raises(HeadspanError, match=sentence):
        hs.diff(random_model(), other)


@pytest.mark.parametrize(
    ("drift", "floor", "moved"),
    [(1e-3, 1e-3, False), (1.01e-3, 1e-3, True), (1e-12, math.nan, False), (1.1e-12, math.nan, True)],
)
def test_more_than_the_floor_has_moved(drift: float, floor: float, moved: bool) -> None:
    assert PortDrift(hs.Head(0, 0), Role.Q, drift, floor, 1.0, 4, 4).moved is moved


def test_a_checkpoint_without_norms_is_compared_unless_they_are_folded(tmp_path: Path) -> None:
    d, rng = 24, np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        config = {"model_type": "gpt2", "n_embd": d, "n_head": 3, "n_layer": 2, "vocab_size": 9, "n_positions": 8}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        widths = {"c_attn": 3 * d, "c_proj": d}
        shapes = {f"h.{i}.attn.{part}.weight": (d, width) for i in range(2) for part, width in widths.items()}
        tensors = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
        save_file(tensors, tmp_path / name / "model.safetensors")
    change = hs.diff(tmp_path / "a", tmp_path / "b")
    assert len(change.drift) == 24 and all(line.moved for line in change.drift)
    with pytest.raises(HeadspanError, match=r"h\.0\.ln_1\.weight"):
        hs.diff(tmp_path / "a", tmp_path / "b", fold=True)


@pytest.mark.filterwarnings("error")
def test_a_dead_head_does_not_move() -> None:
    base = random_model(layers=2)
    base["V"][0, 1] = 0
    with pytest.warns(hs.HeadspanWarning, match=r"L0H1\.V .* rank 0 of 6"):  # any other warning is an error
        line = hs.diff(base, base).of("L0H1.V")
    assert (line.drift, line.angle, line.rank_before, line.rank_after, line.moved) == (0, 0, 0, 0, False)
    assert line.floor == 1e-20


def test_rank_deficient_heads() -> None:
    base = random_model(layers=2)
    base["V"][0, 1, :, 3:] = 0
    other = {role: array.copy() for role, array in base.items()}
    other["V"][0, 1, :, 3] = np.random.default_rng(0).normal(size=48)
    line = hs.diff(base, other).of("L0H1.V")
    assert (line.rank_before, line.rank_after) == (3, 4)
    assert line.angle > 60 and 0.15 < line.drift <= 0.25  # one direction of four is new


def test_records_file_and_frame(tmp_path: Path) -> None:
    base = random_model(layers=2)
    other = random_model(seed=9, layers=2)
    change = hs.diff(base, other, k=3)
    named = [f"L{layer}H{head}.{role}" for role in "QKVO" for layer in range(2) for head in range(4)]
    assert [f"{line.head}.{line.role}" for line in change.drift] == named  # by role, as scores have their heads
    drifts = [line.drift for line in change.drift]
    assert [line.drift for line in change.top(32)] == sorted(drifts, reverse=True) != drifts
    assert hs.diff("demo", "demo").k == 20
    with pytest.raises(TypeError, match="unhashable"):
        hash(change)  # two with the same numbers are equal
    assert change.top() == change.top(3) == change.top(32)[:3]
    rows = change.rows("all")
    assert [row["drift"] for row in change.rows("drift")] == sorted(drifts, reverse=True)
    assert {row["table"] for row in rows} == {"drift", "edge", "hub"}
    assert len({tuple(row) for row in rows}) == 1
    assert len(change.to_pandas()) == len(change.drift) == 32
    assert repr(change).startswith("Diff of arrays and arrays: 32 weights, 32 moved")
    assert "L0H" in change._repr_html_()
    change.save(tmp_path / "d.safetensors")
    again = hs.load(tmp_path / "d.safetensors")
    assert again == change and again.drift == change.drift and again.edges == change.edges and again.hubs == change.hubs
    assert again.before == change.before and again.after == change.after and again.notes == change.notes
    assert again.of("L0H0.K") == change.of("L0H0.K")
    with safe_open(tmp_path / "d.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["headspan"])["kind"] == "diff"
        assert np.allclose(file.get_tensor("after/pk/OK"), change.after["pk", "OK"].values, equal_nan=True)
    with pytest.warns(DeprecationWarning, match=r"Diff\.records is now Diff\.rows"):
        assert change.records() == rows


def test_opened_weights_and_a_file_without_nan(tmp_path: Path) -> None:
    base, other = random_model(layers=2), random_model(seed=9, layers=2)
    change = hs.diff(hs.open(base), hs.open(other), k=3)
    assert change == hs.diff(base, other, k=3) != hs.diff(base, base, k=3)
    unknown = replace(change, drift=[line._replace(floor=math.nan) for line in change.drift])
    unknown.save(tmp_path / "d.safetensors")
    again = hs.load(tmp_path / "d.safetensors")
    assert again == unknown != change
    assert all(math.isnan(line.floor) and line.drift > 0 for line in again.drift)
    with safe_open(tmp_path / "d.safetensors", "np") as file:
        json.loads(file.metadata()["headspan"], parse_constant=pytest.fail)  # no NaN, which JSON does not have


def test_progress_counts_drift_and_both_models_alike() -> None:
    told: list[tuple[int, int]] = []
    hs.diff("demo", "demo", progress=lambda done, total: told.append((done, total)))
    steps = 2 * 4  # layers and roles
    assert {total for _, total in told} == {3 * steps} and told[-1][0] == 3 * steps
    done = [number for number, _ in told]
    assert done[:steps] == list(range(1, steps + 1)) and done == sorted(done) and 2 * steps in done


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_command_line(tmp_path: Path) -> None:
    result = run("diff", "demo", "demo", "--json")
    rows = json.loads(result.stdout)
    assert len(rows) == 64 and not any(row["moved"] for row in rows) and rows[0]["table"] == "drift"
    rows = list(csv.DictReader(io.StringIO(run("diff", "demo", "demo", "--csv", "--table", "drift").stdout)))
    assert len(rows) == 64 and float(rows[0]["drift"]) < 1e-20
    text = run("diff", "demo", "demo", "--fold", "-k", "2").stdout
    assert "(0 of 64 above the rounding floor)" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("demo", "demo", "--table", "x"), "unknown table 'x'"),
        (("demo", "{result}"), "is a result file"),
        (("{adapter}", "demo"), "base model first"),
    ],
)
def test_refusals(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    hs.score(hs.open("demo"), "pk", "OK", out=tmp_path / "r.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    places = {"result": tmp_path / "r.safetensors", "adapter": tmp_path / "adapter"}
    result = run("diff", *(argument.format(**places) for argument in arguments))
    assert isinstance(result.exception, HeadspanError)
    assert sentence in str(result.exception)


def test_a_quantised_copy_of_a_real_model(minilm_dir: Path) -> None:
    base = hs.open(minilm_dir)
    arrays = {str(role): np.stack([base.read(role, layer) for layer in base.layers]) for role in ROLES}
    change = hs.diff(base, {role: array.astype(ml_dtypes.bfloat16) for role, array in arrays.items()})
    assert not any(line.moved for line in change.drift)
    assert 0 < max(line.drift for line in change.drift) < 1e-3


@pytest.mark.slow
def test_a_real_model_stored_again_in_another_format(smollm2_gguf: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = Path(__file__).parents[1] / "examples" / "requantise.py"
    specification = importlib.util.spec_from_file_location("requantise", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.requantise(smollm2_gguf, "Q8_0", tmp_path / "q8.gguf") == 120
    change = hs.diff(str(smollm2_gguf), str(tmp_path / "q8.gguf"))
    assert not any(line.moved for line in change.drift) and not change.notes
    assert 1e-5 < max(line.drift for line in change.drift) < 1e-3  # the table in docs/change.md says 0.0008
    assert not [edge for edge in change.edges if edge.kind in ("entered", "left")]


def test_effects_before_and_after(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            n_embd=24, n_layer=2, n_head=2, vocab_size=50, n_positions=128, initializer_range=0.3
        )
        folders.append(tmp_path / f"model{seed}")
        transformers.GPT2LMHeadModel(config).save_pretrained(folders[-1])
    change = hs.diff(*folders, effects=True, k=2)
    measured = [hs.effects(folder) for folder in folders]
    assert change.edges
    for edge in change.edges:
        expected = [m.matrix(edge.pairing).at(edge.source, edge.target) for m in measured]
        assert [edge.effect_before, edge.effect_after] == pytest.approx(expected, abs=1e-6)
    assert all(row["effect_before"] is not None for row in change.rows("edge"))
    assert all(edge.effect_before is None for edge in hs.diff(*folders, k=2).edges)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(HeadspanError, match="adapter"):
        hs.diff(folders[0], tmp_path / "adapter", effects=True)


def test_words_match_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words about ranks are next to ranks: a hub may move up while its score falls."""
    rng = np.random.default_rng(2)
    common, shape = rng.standard_normal((24, 4)), (3, 4, 24, 4)
    before = {role: common + rng.standard_normal(shape) for role in "QKVO"}
    after = {role: array - 0.7 * common + 0.5 * rng.standard_normal(shape) for role, array in before.items()}
    change = hs.diff(hs.open(before), hs.open(after), k=10)
    ups = [hub for hub in change.hubs if hub.kind == "rank up"]
    assert any(hub.change < 0 for hub in ups)
    for one in (*change.hubs, *change.edges):
        assert one.change == pytest.approx(one.after - one.before, abs=1e-6)
    for hub in change.hubs:
        assert (hub.kind == "rank up") == (hub.rank_after < hub.rank_before)
    entered = [edge for edge in change.edges if edge.kind in ("entered", "left")]
    assert any((edge.change < 0) == (edge.kind == "entered") for edge in entered)
    for edge in change.edges:
        k, up = 10, edge.rank_after
        assert edge.kind != "entered" or (up <= k < edge.rank_before)
        assert edge.kind != "left" or (edge.rank_before <= k < up)
        assert edge.kind not in ("strengthened", "weakened") or (edge.change > 0) == (edge.kind == "strengthened")
    from safetensors.numpy import save_file

    for name, arrays in (("a", before), ("b", after)):
        tensors = {f"blocks.{i}.attn.W_{r}": np.ascontiguousarray(a[i].transpose(0, 2, 1) if r == "O" else a[i])
                   for r, a in arrays.items() for i in range(3)}  # fmt: skip
        save_file(tensors, tmp_path / f"{name}.safetensors")
    assert _run(["diff", f"{tmp_path}/a.safetensors", f"{tmp_path}/b.safetensors", "-k", "10", "--table", "hub"]) == 0
    text = capsys.readouterr().out
    assert not any(word in text for word in ("rose", "fell", "gained", "lost"))
    hub = next(hub for hub in ups if hub.change < 0)
    ranks, score = f"{hub.rank_before} → {hub.rank_after}", f"{hub.change:+.3f}"
    line = next(x for x in text.splitlines() if str(hub.pairing) in x and hub.hub in x and f" {hub.head} " in x)
    assert ranks in line and score in line
