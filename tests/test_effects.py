"""Effects against TransformerLens and against what was planted; shared directions, sequences, memory, Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from conftest import unavailable
from families import FAMILIES, build
from headspan.running.effects import effects
from headspan.running.samples import EFFECTS_TEXT, built_in_text, equal_windows
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

DEMO = Path(hs.__file__).parent / "data" / "demo"
TOKENS = [[5, 10, 15, 20, 25, 30, 35, 40], [7, 3, 44, 3, 12, 48, 9, 21]]


@pytest.fixture(scope="module")
def demo() -> hs.Effects:
    return effects("demo", random=True, sequences=2, length=20)


# -- TransformerLens -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridge() -> Any:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        unavailable("TransformerLens is not installed")
    return TransformerBridge.boot_transformers(str(DEMO)).eval()


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_equal_to_direct_path_patching(bridge: Any, role: str) -> None:
    from transformer_lens.patching import get_act_patch_direct_path

    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 1300, size=(2, 12))
    ours = effects("demo", tokens=tokens.tolist(), pairing=f"O{role}").of(f"O{role}")

    caches = [bridge.run_with_cache(torch.from_numpy(row[None]))[1] for row in tokens]
    seen: dict[str, Any] = {}
    names = {"pattern": "blocks.1.attn.hook_pattern", "z": "blocks.1.attn.hook_z"}
    for label, name in names.items():
        bridge.add_hook(name, lambda value, hook, label=label: seen.__setitem__(label, value.detach()[0].clone()))
    w_o = bridge.blocks[1].attn.W_O.detach()

    def measured(head: int, mine: Any) -> Any:
        """(change of attention of all queries) or the change and size of the head's output, under the last patch."""
        if role != "V":
            return (seen["pattern"][head] - mine[names["pattern"]][0, head]).abs().sum().item() / 2
        change = (seen["z"][:, head] - mine[names["z"]][0][:, head]) @ w_o[head]
        return change.square().sum().item()

    n = 8
    for source in (0, 2, 3, 7):
        totals = np.zeros(n)
        for mine, other, row in ((caches[0], caches[1], tokens[0]), (caches[1], caches[0], tokens[1])):
            turn = iter(range(n))
            patched = get_act_patch_direct_path(
                bridge, torch.from_numpy(row[None]), other, mine,
                lambda logits, turn=turn, mine=mine: torch.tensor(measured(next(turn), mine)),
                src_layer=0, src_head=source, component=role.lower(), verbose=False,
            )  # fmt: skip
            totals += patched[1].numpy()
        if role == "V":
            outputs = [torch.einsum("thm,hmd->thd", cache[names["z"]][0], w_o) for cache in caches]
            sizes = sum(out.square().sum((0, 2)).numpy() for out in outputs)
            theirs = np.sqrt(totals / sizes)
        else:
            theirs = totals / tokens.size
        np.testing.assert_allclose(ours[source, n:], theirs, atol=1e-5)
    bridge.reset_hooks()


# -- what is there and what is not ---------------------------------------------------------------------------


def planted() -> Any:
    """Two layers in which L0H1 alone writes, and only the keys of L1H2 read where it writes."""
    model = build(FAMILIES["gpt2"])
    first, second = model.transformer.h
    with torch.no_grad():
        for norm in (first.ln_1, second.ln_1):
            norm.weight.fill_(1.0)
            norm.bias.zero_()
        weight = first.attn.c_proj.weight  # (heads · m, d)
        weight.zero_()
        mine = torch.zeros(6, 24)
        mine[:, :6] = torch.eye(6) - 1 / 6  # centred within the first six dimensions, as all the stream is
        weight[6:12] = mine
        second.attn.c_attn.weight[:6] = 0.0  # nobody reads there …
        keys = 24 + 2 * 6
        second.attn.c_attn.weight[:6, keys : keys + 6] = 3 * torch.eye(6)  # … but the keys of head 2
    return model


def test_planted_edges_are_found_and_absent_ones_are_zero() -> None:
    found = effects(planted(), tokens=TOKENS, frozen_norm=True)
    for pairing in ("OQ", "OK", "OV"):
        values = found.of(pairing)[:4, 4:]
        expected = np.zeros((4, 4), dtype=bool)
        if pairing == "OK":
            expected[1, 2] = True
        assert (values[expected] > 0.01).all()
        assert np.abs(values[~expected]).max() <= 2e-6  # rounding
    exact = effects(planted(), tokens=TOKENS)
    for pairing in ("OQ", "OK", "OV"):
        assert (exact.of(pairing)[[0, 2, 3], 4:] == 0).all()  # heads that write nothing
    assert exact.matrix("OK").top(1)[0][3:5] == (hs.Head(0, 1), hs.Head(1, 2))


def test_only_forward_edges_are_measured(demo: hs.Effects) -> None:
    for pairing in ("OQ", "OK", "OV"):
        values = demo.of(pairing)
        assert np.isnan(values[8:]).all() and np.isnan(values[:, :8]).all()
        assert not np.isnan(values[:8, 8:]).any()
        assert (values[:8, 8:] >= 0).all()


def test_the_induction_circuit_of_the_demo_model(demo: hs.Effects) -> None:
    """The previous-token head feeds the keys of the induction heads, whose induction score drops without it."""
    behaviour = hs.behaviour("demo", sequences=8, length=20)
    previous = hs.Head.parse(behaviour.top("previous_token", 1)[0][0])
    inducing = [hs.Head.parse(name) for name, value in behaviour.top("induction", 8) if value > 0.4]
    assert inducing
    for head in inducing:
        column = demo.ports.query.index(head)
        into = demo.of("OK")[:, column]
        assert demo.ports.query[int(np.nanargmax(into))] == previous
        change = demo.arrays["induction", hs.Pairing.parse("OK")][demo.ports.query.index(previous), column]
        assert change < -0.25


def test_clean_head_scores_are_those_of_behaviour() -> None:
    found = effects("demo", random=True, sequences=3, length=20, seed=4)
    expected = hs.behaviour("demo", sequences=3, length=20, seed=4)
    for kind in expected:
        np.testing.assert_allclose(found.clean[kind], expected.arrays[kind], atol=1e-6)


# -- shared directions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "olmo", "falcon-rw", "olmo2", "gemma3", "glm4"])
@pytest.mark.parametrize("frozen", [False, True])
def test_all_of_the_ports_subspace_carries_all_of_the_effect(name: str, frozen: bool) -> None:
    model = build(FAMILIES[name])
    whole = effects(model, tokens=TOKENS, frozen_norm=frozen)
    inside = effects(model, tokens=TOKENS, frozen_norm=frozen, shared=8)
    fewer = effects(model, tokens=TOKENS, frozen_norm=frozen, shared=1)
    for pairing in whole.pairings:
        np.testing.assert_allclose(inside.of(pairing), whole.of(pairing), atol=1e-6)
        assert np.nanmax(np.abs(fewer.of(pairing) - whole.of(pairing))) > 1e-3


def test_a_few_shared_directions_of_a_real_edge_carry_a_part(demo: hs.Effects) -> None:
    some = effects("demo", random=True, sequences=2, length=20, pairing="OK", shared=8)
    best = demo.matrix("OK").top(1)[0]
    assert 0.2 * best.score < some.matrix("OK").at(best.source, best.target) < best.score


# -- norms, groups, sequences --------------------------------------------------------------------------------


def test_frozen_norms_differ_little(demo: hs.Effects) -> None:
    frozen = effects("demo", random=True, sequences=2, length=20, frozen_norm=True)
    differences = [np.nanmax(np.abs(frozen.of(p) - demo.of(p))) for p in ("OQ", "OK")]
    assert 0 < max(differences) < 0.05


def test_a_shared_head_has_the_mean_and_the_largest_of_its_group() -> None:
    found = effects(build(FAMILIES["llama"]), tokens=TOKENS)
    for pairing in ("OK", "OV"):
        mean, largest = found.of(pairing), found.arrays["tokens_largest", hs.Pairing.parse(pairing)]
        assert mean.shape == (8, 4)
        assert str(found.matrix(pairing).targets[-1]) == "L1KV1"
        assert (largest[:4, 2:] >= mean[:4, 2:]).all() and (largest[:4, 2:] > mean[:4, 2:]).any()
    assert ("tokens_largest", hs.Pairing.parse("OQ")) not in found.arrays


def test_percentiles_are_within_a_pair_of_layers() -> None:
    config = FAMILIES["gpt2"].config | {"n_layer": 3}
    found = effects(build(type(FAMILIES["gpt2"])("gpt2", config, 4)), tokens=TOKENS)
    percentiles = found.percentiles("OQ")
    for a, b in ((0, 1), (0, 2), (1, 2)):
        block = percentiles[4 * a : 4 * a + 4, 4 * b : 4 * b + 4]
        np.testing.assert_allclose(np.sort(block.ravel()), np.arange(16) * 100 / 15, atol=1e-4)


def test_default_is_random_tokens_and_our_text() -> None:
    found = effects("demo", sequences=2, length=10, pairing="OQ")
    assert found.materials == ("random", "text")
    np.testing.assert_array_equal(found.of("OQ"), np.fmax(found.of("OQ", "random"), found.of("OQ", "text")))
    assert sum(found.protocol["tokens"]["text"]) > 300 and 250 < len(built_in_text(EFFECTS_TEXT).split()) < 450


def test_a_long_text_is_run_in_windows() -> None:
    words = "the cat sat on the mat and the dog sat on the cat " * 40
    found = effects("demo", text=words, pairing="OQ")
    lengths = found.protocol["tokens"]["text"]
    assert len(lengths) > 3 and max(lengths) == 128


@pytest.mark.parametrize("sizes", [[300], [5], [9, 4], [40, 40, 3], [2, 2], [1000, 1]])
def test_windows_leave_no_longest_alone(sizes: list[int]) -> None:
    windows = [len(w) for w in equal_windows([range(n) for n in sizes], 128)]
    assert windows.count(max(windows)) >= 2 and max(windows) <= 128
    assert sum(sizes) - sum(windows) <= len(sizes)  # at most a last token of each text is left out


def test_little_memory_gives_the_same(demo: hs.Effects) -> None:
    model = build(FAMILIES["llama"])
    tokens = [np.random.default_rng(i).integers(0, 50, 12).tolist() for i in range(6)]
    whole, bounded = (effects(model, tokens=tokens, ablate="zero", memory=m) for m in ("1GB", "60kB"))
    for pairing in whole.pairings:
        np.testing.assert_allclose(whole.of(pairing), bounded.of(pairing), atol=1e-6)
    with pytest.raises(HeadspanError, match=r"need .* MB to record"):
        effects(model, tokens=tokens, memory="1kB")


def test_interrupting_keeps_finished_layers() -> None:
    config = FAMILIES["gpt2"].config | {"n_layer": 4}
    model = build(type(FAMILIES["gpt2"])("gpt2", config, 4))
    whole = effects(model, tokens=TOKENS)

    def stop(done: int, total: int) -> None:
        if done == 5:  # in the third of four layers, two sequences each
            raise KeyboardInterrupt

    part = effects(model, tokens=TOKENS, progress=stop)
    assert part.interrupted and "2 of 4 layers" in part.notes[-1]
    values, all_of_them = part.of("OQ"), whole.of("OQ")
    np.testing.assert_array_equal(values[:4, 4:8], all_of_them[:4, 4:8])
    assert np.isnan(values[:, 8:]).all()


def test_a_result_limits_what_is_measured(tmp_path: Path) -> None:
    config = FAMILIES["gpt2"].config | {"n_layer": 3}
    model = build(type(FAMILIES["gpt2"])("gpt2", config, 4))
    scores = hs.score(hs.open(model), metric=["pk"], pairing="flow")
    whole, part = effects(model, tokens=TOKENS), effects(model, scores, k=1, tokens=TOKENS)
    for pairing in whole.pairings:
        best = scores["pk", pairing].top(1)[0]
        values = part.of(pairing)
        assert np.count_nonzero(~np.isnan(values)) == 16  # the two layers of the best edge
        assert part.matrix(pairing).at(best.source, best.target) == whole.matrix(pairing).at(best.source, best.target)
        row = part.records(scores, k=1, by="score")[0 if str(pairing) == "OQ" else 1 if str(pairing) == "OK" else 2]
        assert (row["source"], row["target"], row["rank"]) == (str(best.source), str(best.target), 1)


def test_a_result_of_another_model_is_refused() -> None:
    scores = hs.score(hs.open(build(FAMILIES["llama"])), metric=["pk"], pairing="flow")
    with pytest.raises(HeadspanError, match="result of another model"):
        effects("demo", scores)


# -- the beginning of a sequence -----------------------------------------------------------------------------


def test_bos_is_put_in_front() -> None:
    plain, behind = (effects("demo", random=True, sequences=2, length=10, pairing="OQ", bos=b) for b in ("auto", "yes"))
    assert plain.protocol["bos"] is None and plain.protocol["tokens"]["random"] == [20, 20]
    assert behind.protocol["bos"] == 0 and behind.protocol["tokens"]["random"] == [21, 21]
    with pytest.raises(HeadspanError, match="auto, yes or no"):
        effects("demo", bos="maybe")


# -- what cannot be asked ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairing": "QK"}, "effects are measured for OQ, OK, OV"),
        ({"ablate": "noise"}, "resample, mean, zero"),
        ({"tokens": [[1, 2, 3]]}, "resampling needs another sequence"),
        ({"tokens": [[1], [2]]}, "at least two ids"),
        ({"tokens": [[1, 99999], [1, 2]]}, "at least two ids from 0 to 1359"),
        ({"text": "the"}, "too short"),
        ({"random": False}, "nothing to run"),
        ({"shared": 0}, "shared directions is 0"),
        ({"memory": "much"}, "not an amount of memory"),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadspanError, match=message):
        effects("demo", **options)


def test_a_model_that_changes_the_stream_is_refused() -> None:
    """Not in any list: the checks find that its blocks scale the stream."""
    model = build(FAMILIES["llama"])
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 0.5
    with pytest.raises(HeadspanError, match="changes the stream"):
        effects(model, tokens=TOKENS)


def test_a_weight_of_nan_is_named() -> None:
    model = build(FAMILIES["llama"])
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[9, 3] = float("nan")
    with pytest.raises(HeadspanError, match="weight Q of head L1H1"):
        effects(model, tokens=TOKENS)


def test_one_layer_has_no_edges() -> None:
    config = FAMILIES["gpt2"].config | {"n_layer": 1}
    with pytest.raises(HeadspanError, match="one attention layer"):
        effects(build(type(FAMILIES["gpt2"])("gpt2", config, 4)), tokens=TOKENS)
