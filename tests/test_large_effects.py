"""Large effects: random outputs against hooked forward passes; random weights have none; old results load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, Family, build
from headspan.cli import _run
from headspan.cli.effects import _legend
from headspan.explorer.report import report
from headspan.results.effects import NOT_COMPARED
from headspan.results.effects_fields import with_effects
from headspan.results.large_effects import LEAST_RATIO, random_write, rotation
from headspan.running import random_writes
from headspan.running.effects import attach, effects, effects_in
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = [[5, 10, 15, 20, 25, 30, 35, 40], [7, 3, 44, 3, 12, 48, 9, 21]]
N = 4


# -- against hooked forward passes ---------------------------------------------------------------------------


class Oracle:
    """Two layers of GPT-2 or Llama in float64; one forward pass for each source, port and sequence, by plain hooks."""

    def __init__(self, model: Any, turn: np.ndarray) -> None:
        self.model, self.turn = model, torch.from_numpy(turn)
        self.old = hasattr(model, "transformer")
        blocks = model.transformer.h if self.old else model.model.layers
        self.norm = blocks[1].ln_1 if self.old else blocks[1].input_layernorm
        self.attention = [block.attn if self.old else block.self_attn for block in blocks]
        self.outputs = [attention.c_proj if self.old else attention.o_proj for attention in self.attention]
        self.clean = [self.run(ids) for ids in TOKENS]

    def run(self, ids: list[int], module: Any = None, change: Any = None) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        handles = [self.norm.register_forward_pre_hook(lambda m, args: seen.__setitem__("stream", args[0][0].clone()))]
        for i, output in enumerate(self.outputs):
            handles.append(output.register_forward_pre_hook(lambda m, a, i=i: seen.__setitem__(f"z{i}", a[0][0])))
        if module is not None:
            handles.append(module.register_forward_hook(lambda m, args, out: change(out.clone())))
        with torch.no_grad():
            seen["pattern"] = self.model(torch.tensor([ids]), output_attentions=True).attentions[1][0]
        for handle in handles:
            handle.remove()
        return seen

    def weight(self, layer: int) -> Any:
        """W_O of every head, (heads, m, d)."""
        weight = self.outputs[layer].weight.detach()
        return (weight if self.old else weight.T).reshape(N, -1, weight.shape[1 if self.old else 0])

    def edited(self, i: int, head: int, role: str) -> dict[str, Any]:
        z, other = (self.clean[j]["z0"].view(8, N, -1)[:, head] for j in (i, 1 - i))
        delta = (z - other) @ self.weight(0)[head] @ self.turn
        with torch.no_grad():
            read = self.norm(self.clean[i]["stream"] - delta)
            if self.old:
                module, part = self.attention[1].c_attn, slice(24 * "QKV".index(role), 24 * ("QKV".index(role) + 1))
            else:
                module, part = getattr(self.attention[1], f"{role.lower()}_proj"), slice(None)
            new = module(read)

        def change(out: Any) -> Any:
            out[0][:, part] = new[:, part]
            return out

        return self.run(TOKENS[i], module, change)

    def effects(self, head: int, role: str) -> np.ndarray:
        """On every query head of the second layer."""
        after = [self.edited(i, head, role) for i in range(2)]
        pairs = list(zip(after, self.clean, strict=True))
        if role != "V":
            return torch.cat([(a["pattern"] - b["pattern"]).abs().sum(-1) / 2 for a, b in pairs], 1).mean(1).numpy()
        change, size = (
            sum(torch.einsum("thm,hmd->thd", z.view(8, N, -1), self.weight(1)).square().sum((0, 2)) for z in zs)
            for zs in ([a["z1"] - b["z1"] for a, b in pairs], [b["z1"] for _, b in pairs])
        )
        return torch.sqrt(change / size).numpy()


@pytest.mark.parametrize(("name", "group"), [("gpt2", 1), ("llama", 2)])
def test_random_writes_equal_hooked_forward_passes(name: str, group: int) -> None:
    """One draw, in float64; a shared key/value head has the mean over its query heads."""
    model = build(FAMILIES[name]).double()
    found = effects(model, tokens=TOKENS, draws=1, floor=1e-9, seed=5)
    oracle = Oracle(model, rotation(24, 5, 0))
    for pairing in FLOW_PAIRINGS:
        turned = found.arrays["tokens_turned", pairing]
        role, heads = str(pairing)[1], 1 if str(pairing) == "OQ" else group
        for head in range(N):
            theirs = oracle.effects(head, role).reshape(-1, heads).mean(1)
            np.testing.assert_allclose(turned[head, turned.shape[1] // 2 :], theirs, rtol=1e-6)
            assert theirs.min() > 1e-4
        np.testing.assert_allclose(found.ratio(pairing), found.of(pairing) / turned, rtol=1e-6)
        assert np.isnan(turned[N:]).all()  # no forward edges


def test_a_turned_write_keeps_lengths_and_angles() -> None:
    first, second = rotation(12, 0, 0), rotation(12, 0, 1)
    for turn in (first, second):
        np.testing.assert_allclose(turn @ turn.T, np.eye(12), atol=1e-12)
    assert np.abs(first - second).max() > 0.1 and np.abs(first - rotation(12, 1, 0)).max() > 0.1
    np.testing.assert_array_equal(first, rotation(12, 0, 0))


def test_what_a_random_write_does_is_the_largest_draw_or_far_out_in_their_scatter() -> None:
    steady = np.array([0.100, 0.102, 0.101, 0.099])
    wild = np.array([0.01, 0.30, 0.02, 0.10])
    untested = np.full(4, np.nan)
    level = random_write(np.stack([steady, steady, wild, untested], axis=1))
    assert level[0] == level[1] == 0.102 and np.isnan(level[3])
    logs = np.log(wild)
    assert level[2] == pytest.approx(np.exp(logs.mean() + 3.5 * logs.std(ddof=1)) / LEAST_RATIO) and level[2] > 0.3
    lucky = np.array([0.1, 0.1, 0.1, 0.1])  # draws that agree by chance scatter as those of other edges do
    level = random_write(np.stack([lucky, wild, wild], axis=1))
    assert level[0] == pytest.approx(0.1 * np.exp(3.5 * logs.std(ddof=1)) / LEAST_RATIO)
    np.testing.assert_array_equal(random_write(steady[:1, None]), steady[:1])


# -- models of random weights --------------------------------------------------------------------------------

SMALL = {"vocab_size": 200, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
OLD = {"vocab_size": 200, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}


def shape(d: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    return SMALL | sizes | {"intermediate_size": 2 * d} | more


RANDOM = {
    "gpt2": ("gpt2", OLD | {"n_embd": 64, "n_layer": 5, "n_head": 4}),
    "gpt2, narrow heads": ("gpt2", OLD | {"n_embd": 24, "n_layer": 3, "n_head": 12}),
    "gpt2, two layers": ("gpt2", OLD | {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "gpt2, one head": ("gpt2", OLD | {"n_embd": 64, "n_layer": 3, "n_head": 1}),
    "llama, shared keys": ("llama", shape(64, 5, 8, 2)),
    "llama, shallow": ("llama", shape(128, 3, 4, 2)),
    "qwen3, QK-norm": ("qwen3", shape(64, 3, 2, 1, head_dim=32)),
    "gemma2, sandwich norms": ("gemma2", shape(32, 4, 4, 2, head_dim=8)),
    "gemma3, sandwich and QK-norm": ("gemma3_text", shape(64, 3, 2, 1, head_dim=32)),
    "olmo2, norm on the output": ("olmo2", shape(64, 3, 4, 4)),
    "neox, parallel": ("gpt_neox", {k: v for k, v in shape(64, 3, 2, 2).items() if k != "num_key_value_heads"}),
}


def test_at_most_one_in_a_thousand_edges_of_random_weights_has_a_large_effect() -> None:
    """As models are initialised, and with weights so large that most edges are above the floor."""
    tokens = [np.random.default_rng(i).integers(0, 200, 24).tolist() for i in range(3)]
    edges, above, large = 0, 0, dict.fromkeys(RANDOM, 0)
    for name, (kind, config) in RANDOM.items():
        for spread in (0.02, 0.2):
            torch.manual_seed(0)
            sized = transformers.AutoConfig.for_model(kind, initializer_range=spread, **config)
            model = transformers.AutoModelForCausalLM.from_config(sized, attn_implementation="eager").eval()
            found = effects(model, tokens=tokens)
            for pairing in found.pairings:
                values = found.of(pairing)
                edges += int((values >= 0).sum())
                above += int((values >= found.floor(pairing)).sum())
                large[name] += int(found.large(pairing).sum())
                assert found.judged(pairing)[~np.isnan(values)].all()
    assert edges > 6000 and above > edges / 4  # the floor alone would not do
    assert sum(large.values()) <= edges / 1000, large


# -- trained models ------------------------------------------------------------------------------------------


def test_stories_has_a_few_strong_edges(stories260k_dir: Path) -> None:
    found = effects(stories260k_dir, random=True)
    count = {str(p): int(found.large(p).sum()) for p in found.pairings}
    assert 1 <= count["OQ"] <= 3 and 2 <= count["OK"] <= 6 and count["OV"] <= 1
    for pairing in found.pairings:
        large = found.large(pairing)
        assert (found.of(pairing)[large] >= found.floor(pairing)).all()
        assert (found.ratio(pairing)[large] >= LEAST_RATIO).all()


def test_a_long_write_is_not_a_large_effect(iglm_dir: Path) -> None:
    """The largest OV effect of IgLM-S, 0.76 of the target's output, is that of a random output of its length."""
    found = effects(iglm_dir, random=True)
    values, ratio = found.of("OV"), found.ratio("OV")
    most = np.unravel_index(np.nanargmax(values), values.shape)
    assert values[most] > 0.7 and 0.9 < ratio[most] < 1.2 and not found.large("OV")[most]
    assert found.large("OQ").sum() >= 3 and found.large("OK").sum() >= 2


def test_the_demo_keeps_its_circuit() -> None:
    found = effects("demo", random=True, sequences=2, length=20)
    assert found.large("OK")[3, 8:].all()  # from the previous-token head to every induction head
    assert found.large("OQ")[2, 8:].all()
    assert not found.large("OK")[:, :8].any() and not found.judged("OK")[:, :8].any()  # no forward edges


# -- what was not compared -----------------------------------------------------------------------------------


@pytest.fixture
def old_result(tmp_path: Path) -> Path:
    """A result as version 0.3 wrote it: effects without floors and random outputs."""
    scores = hs.score("demo", "pk", "flow")
    found = effects("demo", random=True, sequences=2, length=12, draws=0)
    assert not any(name.endswith("_turned") for name, _ in found.arrays) and "floors" not in found.protocol
    attach(scores, found)
    path = tmp_path / "old.safetensors"
    scores.save(path)
    return path


def test_effects_of_an_earlier_version_are_neither_large_nor_small(
    old_result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = hs.load(old_result)
    found = effects_in(scores)
    assert found is not None and found.notes == [NOT_COMPARED] and not found.compared
    assert not found.large("OK").any() and not found.judged("OK").any() and np.isnan(found.ratio("OK")).all()
    assert {row["large_effect"] for row in found.rows()} == {None}
    rows = with_effects(hs.top(scores, "OK", 3).rows(), scores)
    assert all(row["effect"] > 0 and row["large_effect"] is None for row in rows)
    page = report(scores).payload
    assert NOT_COMPARED in page["notes"] and page["effects"]["compared"] is False and page["tour"] == []
    assert not any("large effect" in finding["title"] for finding in page["findings"])
    assert _run(["wiring", str(old_result), "--large-effect"]) == 2
    assert "Measure them again: headspan effects MODEL" in " ".join(capsys.readouterr().err.split())


def test_shared_directions_are_not_compared() -> None:
    found = effects(build(FAMILIES["gpt2"]), tokens=TOKENS, shared=2)
    assert not found.compared and not found.judged("OQ").any()


def test_stopping_among_the_random_writes_leaves_edges_open(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def stop(d: int, seed: int, draw: int) -> np.ndarray:
        drawn.append(draw)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return rotation(d, seed, draw)

    monkeypatch.setattr(random_writes, "rotation", stop)
    found = effects("demo", random=True, sequences=2, length=12)
    assert found.interrupted and "not compared with random outputs" in found.notes[-1]
    values = found.of("OK")
    assert not np.isnan(values[:8, 8:]).any() and not found.large("OK").any()
    judged = found.judged("OK")
    assert (judged[:8, 8:] == (values[:8, 8:] < found.floor("OK"))).all() and not judged[:8, 8:].all()
    left = sum(int((~found.judged(pairing) & (found.of(pairing) >= 0)).sum()) for pairing in found.pairings)
    assert f"({left} edges not yet compared)" in _legend(found)[-1]


def test_the_floor_decides_what_is_compared() -> None:
    high = effects("demo", random=True, sequences=2, length=12, floor=0.3, pairing="OK")
    low = effects("demo", random=True, sequences=2, length=12, pairing="OK")
    assert high.floor("OK") == 0.3 and low.floor("OK") == 0.05 and high.protocol["random_writes"] == 8
    compared = ~np.isnan(high.ratio("OK"))
    np.testing.assert_array_equal(compared, np.nan_to_num(high.of("OK")) >= 0.3)
    np.testing.assert_array_equal(high.large("OK"), low.large("OK") & compared)
    assert 0 < high.large("OK").sum() < low.large("OK").sum()
    row = high.records(k=1)[0]
    assert row["effect_unit"] == "total variation" and row["large_effect"] is True
    assert row["random_write_ratio"] >= LEAST_RATIO and row["percentile_in_layers"] == 100
    wrong: list[dict[str, Any]] = [{"floor": 0.0}, {"floor": float("nan")}, {"draws": -1}]
    for bad in wrong:
        with pytest.raises(HeadspanError, match=r"not possible|0 or more|must be a number"):
            effects("demo", **bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [("floors", {"OK": "much"}), ("floors", 3), ("least_ratio", None), ("tokens", {"random": "all"}), ("tokens", [1])],
)
def test_a_damaged_protocol_is_refused(old_result: Path, name: str, value: Any) -> None:
    scores = hs.load(old_result)
    scores.annotations["effects"] = json.loads(json.dumps(scores.annotations["effects"] | {name: value}))
    with pytest.raises(HeadspanError, match=f"damaged: {name} of its effects"):
        effects_in(scores)


def test_old_names_still_work() -> None:
    found = effects(build(Family("gpt2", FAMILIES["gpt2"].config, 4)), tokens=TOKENS)
    with pytest.deprecated_call(match=r"Effects\.large"):
        np.testing.assert_array_equal(found.used("OK"), found.large("OK"))
    scores = hs.score("demo", "pk", "flow")
    attach(scores, effects("demo", random=True, sequences=2, length=12))
    with pytest.deprecated_call(match="large_effect"):
        old = hs.wiring(scores, "OK", used=True)
    assert [edge[:5] for edge in old.edges] == [edge[:5] for edge in hs.wiring(scores, "OK", large_effect=True).edges]
    assert old.rule.endswith("large effect")
