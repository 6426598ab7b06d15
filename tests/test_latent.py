"""Latent attention: what heads read and write, from our products, equals what the models' own modules do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import LATENT, Family, build, close, normalise
from families_around import LATENT_AROUND
from headspan.checkpoints.opening import open_source
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.families.latent_attention import LatentShape, latent_chance
from headspan.models.families.lookup import find_architecture
from headspan.models.folding import fold
from headspan.node_kinds.neurons import neuron_sets
from headspan.statistics.significance import significance
from headspan.subspaces.random_subspaces import moments
from headspan.vocabulary.heads import PAIRINGS, Head, Role
from test_architectures import check_mlp_norm, check_neurons

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

N = 4
WITHOUT_GATE = [name for name in LATENT if "bailing" not in name]


class Run:
    """A small model run once, with the inputs and outputs of its attention modules."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.model = family, build(family)
        self.model.save_pretrained(folder)
        self.weights = CheckpointWeights(open_source(str(folder)))
        self.shape = self.weights._map.latent
        self.streams = self.weights._map.entry.streams
        self.seen: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        self.attention: dict[int, np.ndarray] = {}
        handles: list[Any] = []
        for layer in self.weights.layers:
            module = self.model.get_submodule(self.live(layer, self.shape.stem.rstrip(".")))
            handles.append(module.register_forward_hook(self._keep_attention(layer)))
            handles.append(module.register_forward_pre_hook(self._keep_input(layer), with_kwargs=True))
            if self.streams:
                norm = self.model.get_submodule(self.weights._map.in_layer(layer, "input_layernorm"))
                handles.append(norm.register_forward_hook(self._keep(layer, "norm")))
            for name_, part in module.named_children():
                if "proj" in name_ or "layernorm" in name_:
                    handles.append(part.register_forward_hook(self._keep(layer, name_)))
        ids = self.ids = torch.arange(1, 8)[None] * 5 % 50
        options = {"attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}
        with torch.no_grad():
            out = self.model(ids, output_hidden_states=True, output_attentions=True, use_cache=False, **options)
        self.stream = dict(enumerate(h.numpy()[0] for h in out.hidden_states))
        if self.streams:
            self.stream = {layer: self.seen[layer, "norm"][0] for layer in self.weights.layers}
        for handle in handles:
            handle.remove()

    def live(self, layer: int, module: str) -> str:
        """The name of a module in the running model; one family's files have names of their own."""
        return self.weights._map.in_layer(layer, module).replace(".attention", ".self_attn")

    def _keep(self, layer: int, name: str) -> Any:
        def keep(module: Any, args: Any, out: Any) -> None:
            self.seen[layer, name] = args[0].detach().numpy().squeeze(), out.detach().numpy().squeeze()

        return keep

    def _keep_input(self, layer: int) -> Any:
        def keep(module: Any, args: Any, kwargs: Any) -> None:
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.seen[layer, "in"] = x.detach().numpy()[0], x.detach().numpy()[0]

        return keep

    def _keep_attention(self, layer: int) -> Any:
        def keep(module: Any, args: Any, out: Any) -> None:
            self.attention[layer] = next(x for x in out[1:] if x is not None and x.ndim == 4).detach().numpy()[0]

        return keep

    def number(self, layer: int, role: str) -> np.ndarray | float:
        """The factor of the inner norm for each token's latent, from the model's own latent."""
        module = self.shape.latent_module(Role(role))
        if module is None:
            return 1.0
        gains = self.weights._map.latents[layer].tensors(Role(role))
        rank = list(gains.values())[1][0]
        latent = self.seen[layer, module.rpartition(".")[2]][1][:, :rank]
        norm = self.model.get_submodule(self.live(layer, list(gains)[1].removesuffix(".weight")))
        eps = next(getattr(norm, key) for key in ("variance_epsilon", "eps") if hasattr(norm, key))
        return 1 / np.sqrt(np.square(latent).mean(-1) + eps)[:, None, None]

    def made(self, layer: int, role: str) -> np.ndarray:
        """(token, head, m) from our weights and the input of the attention module."""
        x = self.seen[layer, "in"][0]
        vectors = np.einsum("td,hdm->thm", x, self.weights.read(role, layer))
        bias = self.weights.bias(role, layer)
        return vectors if bias is None else vectors + bias


EVERY = LATENT | LATENT_AROUND


@pytest.fixture(scope="module", params=EVERY, ids=str)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(EVERY[request.param], tmp_path_factory.mktemp("model"))


def test_sizes_and_names(run: Run) -> None:
    weights, shape = run.weights, run.shape
    assert weights.layers == run.family.layers
    assert [weights.d_head(role) for role in "QVO"] == [6, 5, 5]
    assert weights.d_head("K") == max(6, shape.rotary)
    layer = weights.layers[1]
    rotary = [f"L{layer}KR"] if shape.rotary else []
    assert list(map(str, weights.heads_in("K", layer))) == [f"L{layer}H{i}" for i in range(N)] + rotary
    assert list(map(str, weights.heads_in("Q", layer))) == [f"L{layer}H{i}" for i in range(N)]
    for name in rotary:
        assert weights.ports.group_of(name) == weights.heads_in("O", layer)
        assert weights.read_head(f"{name}.K").shape == (24, shape.rotary)
    assert weights.read_head(f"L{layer}H0.K").shape == (24, 6)
    assert weights.foldable and weights.norm_place == "pre"
    assert any("latent attention" in note for note in weights.notes)


def test_queries(run: Run) -> None:
    """Position-free and rotary rows, up to one scalar per token from the inner norm, which is restored here."""
    factor = np.sqrt(24 / 10) if run.weights.architecture == "longcat_flash" else 1.0  # multiplied behind the weight
    for layer in run.weights.layers:
        module = run.shape.module(Role.Q).rpartition(".")[2]
        theirs = run.seen[layer, module][1].reshape(7, N, -1) * factor
        close(run.made(layer, "Q") * run.number(layer, "Q"), theirs[..., :6])
        if not run.shape.rotary:
            assert run.weights.rotary_queries(layer) is None
            continue
        rotary = np.stack([run.weights.read_head(f"L{layer}QR{i}.Q") for i in range(N)])
        np.testing.assert_array_equal(rotary, run.weights.rotary_queries(layer))
        if run.weights.bias("Q", layer) is None:
            close(np.einsum("td,hdm->thm", run.seen[layer, "in"][0], rotary) * run.number(layer, "Q"), theirs[..., 6:])


def test_keys_and_values(run: Run) -> None:
    for layer in run.weights.layers:
        theirs = run.seen[layer, "kv_b_proj"][1]
        theirs = theirs.reshape(7, N, -1)
        keys = run.made(layer, "K")
        close(keys[:, :N, :6] * run.number(layer, "K"), theirs[..., :6])
        close(run.made(layer, "V") * run.number(layer, "V"), theirs[..., 6:])
        if not run.shape.rotary:
            assert keys.shape == (7, N, 6)
            continue
        rotary = keys[:, N, : run.shape.rotary]
        if run.shape.rotary_norm:  # whose gains are in our weight, what it divides by is put back
            before, after = run.seen[layer, run.shape.rotary_norm]
            close(rotary / np.sqrt(np.square(before).mean(-1, keepdims=True) + 1e-5), after)
        else:
            close(rotary, run.seen[layer, "kv_a_proj_with_mqa"][1][:, 12:])
        assert not keys[:, :N, 6:].any() and not keys[:, N, run.shape.rotary :].any()


def test_output(run: Run) -> None:
    for layer in run.weights.layers:
        values = run.made(layer, "V") * run.number(layer, "V")
        mixed = np.einsum("hij,jhm->ihm", run.attention[layer], values)
        if (layer, "gate_proj") in run.seen:
            mixed = mixed / (1 + np.exp(-run.seen[layer, "gate_proj"][1].reshape(mixed.shape)))
        if (layer, "g_proj") in run.seen:
            mixed = mixed / (1 + np.exp(-run.seen[layer, "g_proj"][1]))[..., None]
        out = np.einsum("ihm,hdm->id", mixed, run.weights.read("O", layer))
        bias = run.weights.bias("O", layer)
        close(out if bias is None else out + bias, run.seen[layer, "o_proj"][1])


def test_neurons_of_every_layer(run: Run) -> None:
    """Dense MLPs, experts and the MLPs they share, on what the model's own MLPs read and give."""
    check_neurons(run)
    check_mlp_norm(run)


def test_experts_of_longcat_read_in_one_layer_and_write_in_the_next(tmp_path: Path) -> None:
    """Its mixture reads after the first attention of a block and is added at the end of the block."""
    build(LATENT["longcat_flash"]).save_pretrained(tmp_path)
    sets = {nodes.stem: nodes for nodes in neuron_sets(hs.open(str(tmp_path)), "*:*")}
    assert {stem: (n.places[Role.R].layer, n.places[Role.W].layer) for stem, n in sets.items()} == {
        "L0N": (0, 0), "L0E": (0, 1), "L1N": (1, 1),
    }  # fmt: skip
    assert sets["L0E"].population == 32 and sets["L1N"].population == 32


def test_norm_in_front_and_folding(run: Run) -> None:
    """Folded products on the bare stream see what the model's own latents see: both norms compose."""
    folded = fold(run.weights)
    for layer in run.weights.layers:
        norm = run.weights.norm(layer)
        assert norm is not None
        x = run.seen[layer, "in"][0]
        if run.weights.architecture != "longcat_flash":  # whose second stream is inside the block
            close(normalise(norm, run.stream[layer]), x)
        bare = x / norm.gain
        for role in "QKV":
            ours = np.einsum("td,hdm->thm", bare, folded.read(role, layer))
            close(ours, np.einsum("td,hdm->thm", x, run.weights.read(role, layer)))
        close(folded.latent_map("K", layer), run.weights.latent_map("K", layer) * norm.gain[:, None])
        if run.shape.rotary:
            close(folded.rotary_queries(layer), run.weights.rotary_queries(layer) * norm.gain[None, :, None])


def test_scores_and_partners(run: Run) -> None:
    """PK and CS of every port against their definitions; the partners of the rotary key are all rotary queries."""
    scores = hs.score(run.weights, ["pk", "cs"], ["OK", "OQ", "KK", "VV"])
    first, second = run.weights.layers[:2]
    writer = run.weights.read_head(f"L{first}H1.O")
    for name in (f"L{second}KR", f"L{second}H2")[not run.shape.rotary :]:
        key = run.weights.read_head(f"{name}.K")
        bases = [np.linalg.qr(w.astype(np.float64))[0] for w in (writer, key)]
        assert scores["pk", "OK"].at(f"L{first}H1", name) == pytest.approx(
            np.square(bases[0].T @ bases[1]).sum(), abs=1e-5
        )
        queries = run.weights.rotary_queries(second) if "KR" in name else run.weights.read("Q", second)[2:3]
        ov = writer @ run.weights.read_head(f"L{first}H1.V").T
        qk = np.concatenate([query @ key.T for query in queries])
        expected = np.linalg.norm(qk @ ov) / np.linalg.norm(qk) / np.linalg.norm(ov)
        assert scores["cs", "OK"].at(f"L{first}H1", name) == pytest.approx(expected, abs=1e-5)
    assert scores.provenance["rank_deficient"] == []


def test_chance_inside_a_layer(run: Run) -> None:
    """Heads of one layer are compared with random subspaces of their latent, heads of two layers with the stream's."""
    scores = hs.score(run.weights, ["pk"], ["KK", "VV"])
    layer, other = run.weights.layers[:2]
    found = run.weights.same_layer_chance("V", "V", layer)
    assert found is not None and found.mean > 25 / 12  # m·m'/r
    assert scores.provenance["same_layer_chance"]["VV"][str(layer)] == [found.mean, found.sd]
    tested = significance(scores, "VV")
    inside, between = scores["pk", "VV"].at(f"L{layer}H0", f"L{layer}H1"), (0, N)
    assert tested.z[0, 1] == pytest.approx((inside - found.mean) / found.sd, rel=1e-5)
    plain = moments(24, 5, 5)
    score = scores["pk", "VV"].values[between]
    assert tested.z[between] == pytest.approx((score - plain.mean) / plain.sd, rel=1e-4)
    if run.shape.rotary:
        keys = significance(scores, "KK")
        rotary = scores["pk", "KK"].values[0, N]  # the rotary key is not in the latent
        plain = moments(24, 6, run.shape.rotary)
        assert keys.z[0, N] == pytest.approx((rotary - plain.mean) / plain.sd, rel=1e-4)
        assert hs.pair(run.weights, f"L{layer}QR0.Q", f"L{other}KR.K").dimensions == (run.shape.rotary,) * 2
    report = hs.pair(run.weights, f"L{layer}H0.V", f"L{layer}H1.V")
    assert (report.random_mean, report.random_sd) == pytest.approx(found)
    assert any("latent of one layer" in note for note in report.notes)
    assert run.weights.same_layer_chance("O", "V", layer) is None
    assert run.weights.same_layer_chance("Q", "K", layer) is None
    assert (run.weights.same_layer_chance("Q", "Q", layer) is None) == (run.shape.q_rank is None)


def test_chance_inside_a_layer_is_kept_for_pairings_with_such_pairs(run: Run) -> None:
    layer = run.weights.layers[0]
    known = {str(pairing) for pairing in PAIRINGS if run.weights.same_layer_chance(*pairing, layer) is not None}
    same = {name for name in known if name[0] == name[1]}
    assert {"KK", "VV"} <= same < known
    for pairs, expected in (("default", same), ("same-type", same), ("forward", set()), ("all", known)):
        provenance = hs.score(run.weights, "pk", "all", pairs).provenance  # type: ignore[arg-type]
        assert set(provenance.get("same_layer_chance", {})) == expected
        assert ("same_layer_chance" in provenance) == bool(expected)
    assert "same_layer_chance" not in hs.score(run.weights, "cs", "VV").provenance


def test_chance_is_that_of_random_weights_of_the_same_latent() -> None:
    """The estimate holds the mean and the spread of heads drawn at random, and is above m·m'/r for uneven latents."""
    rng = np.random.default_rng(0)
    inner = rng.normal(size=(64, 16)) * np.exp(rng.normal(size=16))
    heads = np.einsum("dr,nrm->ndm", inner, rng.normal(size=(60, 16, 8)))
    bases = np.linalg.qr(heads)[0]
    seen = np.square(np.einsum("adm,bdn->abmn", bases[:30], bases[30:])).sum((2, 3))
    found = latent_chance(inner, 8, 8)
    assert found.mean == pytest.approx(seen.mean(), abs=0.1)
    assert found.sd == pytest.approx(seen.std(), rel=0.2)
    assert found.mean > 8 * 8 / 16 + 0.2


def test_similarities_inside_a_head_need_one_width(run: Run) -> None:
    if run.shape.rotary:
        with pytest.raises(hs.HeadspanError, match="the K of"):
            hs.score(run.weights, ["linear_cka"], ["QK"])
    else:
        assert np.isfinite(hs.score(run.weights, ["linear_cka"], ["QK"])["linear_cka", "QK"].pairs()[2]).all()
    assert np.isfinite(hs.score(run.weights, ["linear_cka", "procrustes"], ["OV"])["procrustes", "OV"].pairs()[2]).all()


def test_tokens_info_and_drift(run: Run) -> None:
    weights = run.weights
    layer = weights.layers[0]
    last = str(weights.heads_in("K", layer)[-1])  # the rotary one where there is one
    assert len(hs.tokens(weights, last, "K")) == 10
    facts = hs.info(weights, check=True)
    assert facts["check"]["rank_deficient"] == []
    assert "latent attention" in "\n".join(facts.lines())
    # Several streams, or a norm of the rotary key.
    refused = weights.architecture in ("hy_v4", "glm5_next_text", "dots3_note_text")
    assert ("effects keep the divisors" in " ".join(" ".join(facts.lines()).split())) != refused
    same = hs.diff(weights, weights)
    assert max(line.drift for line in same.drift) < 1e-9 and not any(np.isnan(line.floor) for line in same.drift)
    assert not any(line.moved for line in same.drift)
    assert {str(line.head) for line in same.drift} >= {last, f"L{layer}H0"}


UNEVEN = {
    "num_hidden_layers": 3, "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 14,
    "swa_head_dim": 14, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Dots 3: layers that see a window have other numbers of heads, and other sizes of heads and latents."""
    family = LATENT["dots3_note_text"]
    return Run(replace(family, config=family.config | UNEVEN), tmp_path_factory.mktemp("model"))


def test_layers_of_different_sizes_equal_the_models_own(uneven: Run) -> None:
    run, weights = uneven, uneven.weights
    assert [weights.d_head(role) for role in "QKVO"] == [8, 8, 6, 6]
    for layer, (n, free, rotary, value, rank) in enumerate([(4, 6, 4, 5, 12), (2, 8, 6, 6, 14), (4, 6, 4, 5, 12)]):
        assert [len(weights.heads_in(role, layer)) for role in "QKVO"] == [n, n + 1, n, n]
        x, shape = run.seen[layer, "in"][0], weights._map.latents[layer]
        assert (shape.free, shape.rotary, shape.value, shape.kv_rank) == (free, rotary, value, rank)
        queries, keys, values = (run.made(layer, role) * run.number(layer, role) for role in "QKV")
        theirs = run.seen[layer, "q_b_proj"][1].reshape(7, n, -1)
        close(queries[..., :free], theirs[..., :free])
        theirs = run.seen[layer, "kv_b_proj"][1].reshape(7, n, -1)
        close(keys[:, :n, :free], theirs[..., :free])
        close(values[..., :value], theirs[..., free:])
        assert not (queries[..., free:].any() or keys[:, :n, free:].any() or values[..., value:].any())
        before, after = run.seen[layer, "k_rope_only_layernorm"]
        rotary_key = run.made(layer, "K")[:, n, :rotary]
        close(rotary_key / np.sqrt(np.square(before).mean(-1, keepdims=True) + 1e-5), after)
        gate = 1 / (1 + np.exp(-run.seen[layer, "g_proj"][1]))[..., None]
        mixed = np.einsum("hij,jhm->ihm", run.attention[layer], values) * gate
        out = np.einsum("ihm,hdm->id", mixed, weights.read("O", layer))
        close(out + weights.bias("O", layer), run.seen[layer, "o_proj"][1])
        assert weights.rotary_queries(layer).shape == (n, 24, rotary)
        assert weights.read_head(f"L{layer}KR.K").shape == (24, rotary)
        assert weights.latent_map("K", layer).shape == (24, rank)
        norm = weights.norm(layer)
        close(normalise(norm, run.stream[layer]), x)
    check_neurons(run)
    assert any("12 or 14" in note and "10 or 8" in note for note in weights.notes)
    assert not any("effects keep" in note for note in weights.notes)


def test_scores_between_layers_of_different_sizes(uneven: Run) -> None:
    weights = uneven.weights
    scores = hs.score(weights, ["pk", "cs"], ["OK", "OQ", "OV", "VV", "KK"])
    for source, layer, count in (("L0H1", 1, 2), ("L1H1", 2, 4)):
        write, value = (weights.read_head(f"{source}.{role}") for role in "OV")
        ov = write @ value.T
        for name in [f"L{layer}H{i}" for i in range(count)] + [f"L{layer}KR"]:
            key = weights.read_head(f"{name}.K")
            bases = [np.linalg.qr(w.astype(np.float64))[0] for w in (write, key)]
            expected = np.square(bases[0].T @ bases[1]).sum()
            assert scores["pk", "OK"].at(source, name) == pytest.approx(expected, abs=1e-5)
            rotary = "KR" in name
            queries = weights.rotary_queries(layer) if rotary else [weights.read_head(f"{name}.Q")]
            qk = np.concatenate([query @ key.T for query in queries])
            expected = np.linalg.norm(qk @ ov) / np.linalg.norm(qk) / np.linalg.norm(ov)
            assert scores["cs", "OK"].at(source, name) == pytest.approx(expected, abs=1e-5)
            if not rotary:
                kq = qk.T
                expected = np.linalg.norm(kq @ ov) / np.linalg.norm(kq) / np.linalg.norm(ov)
                assert scores["cs", "OQ"].at(source, name) == pytest.approx(expected, abs=1e-5)
    assert scores.provenance["rank_deficient"] == []
    chance = scores.provenance["same_layer_chance"]["VV"]
    assert chance["1"] == list(weights.same_layer_chance("V", "V", 1)) and chance["0"] != chance["1"]
    significance(scores, "VV")
    same = hs.diff(weights, weights)
    assert not any(line.moved or np.isnan(line.floor) for line in same.drift)


def test_published_configs_of_dots_3_say_the_same(uneven: Run, tmp_path: Path) -> None:
    """They keep the text model's keys next to those for images, and sizes of layers with a window as swa_…."""
    uneven.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "dots3_note", "text_config": config}
    del config["per_layer_config"]
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    published = config | {"model_type": "dots3_note", "layer_types": kinds} | {
        key: value for key, value in UNEVEN.items() if key.startswith("swa_")
    }  # fmt: skip
    for said in (published, nested | {"text_config": published | {"model_type": "dots3_note_text"}}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        found = hs.open(str(tmp_path))
        assert found.architecture == "dots3_note_text"
        for role in "QKVO":
            for layer in range(3):
                np.testing.assert_array_equal(found.read(role, layer), uneven.weights.read(role, layer))
    (tmp_path / "config.json").write_text(json.dumps(published | {"swa_kv_lora_rank": "x"}))
    with pytest.raises(hs.HeadspanError, match="kv_lora_rank = 'x'"):
        hs.open(str(tmp_path))


def test_sizes_of_dots_3_that_a_config_leaves_out_are_those_of_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Dots3NoteTextConfig()
    _, _, config = find_architecture({"model_type": "dots3_note"})
    kinds = [kind.replace("indexed", "full") for kind in theirs.layer_types]
    assert config["layer_types"] == kinds and len(kinds) == 46
    for layer in range(46):
        own = {**config, **config["_latent_sizes"][layer], "num_attention_heads": config["num_attention_heads"][layer]}
        for key in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                    "v_head_dim"):  # fmt: skip
            assert own[key] == getattr(theirs.per_layer_config[layer], key)


def test_effects_of_dots_3_are_refused(uneven: Run) -> None:
    from headspan.running.effects import effects

    tokens = [[5, 10, 15, 20], [7, 3, 44, 3]]
    with pytest.raises(hs.HeadspanError, match="between layers of one shape only"):
        effects(uneven.model, tokens=tokens)
    with pytest.raises(hs.HeadspanError, match="rotary keys have their own norm"):
        effects(build(LATENT["dots3_note_text"]), tokens=tokens)


def test_missing_sizes_are_refused(tmp_path: Path) -> None:
    build(LATENT["youtu"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"qk_nope_head_dim": "six"}))
    with pytest.raises(hs.HeadspanError, match="qk_nope_head_dim = 'six'"):
        hs.open(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 11}))
    with pytest.raises(hs.HeadspanError, match=r"kv_a_proj_with_mqa.weight.*\(16, 24\).*\(15, 24\)"):
        hs.open(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert hs.open(str(tmp_path)).architecture == "deepseek_v3"


def test_sizes_as_published_and_the_largest() -> None:
    """DeepSeek-V3 is far larger than the models of these tests."""
    config = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    shape = LatentShape.of(config | {"q_lora_rank": 1536}, 7168, 128, "deepseek")
    assert (shape.kv_rank, shape.free, shape.rotary, shape.value, shape.q_rank) == (512, 128, 64, 128, 1536)
    assert LatentShape.of(config | {"v_head_dim": None}, 7168, 128, "without it").value == 56  # as MiniCPM3
    assert LatentShape.of(config | {"kv_lora_rank": 2**20}, 7168, 128, "deepseek").kv_rank == 2**20
    with pytest.raises(hs.HeadspanError, match="kv_lora_rank = 1048577"):
        LatentShape.of(config | {"kv_lora_rank": 2**20 + 1}, 7168, 128, "deepseek")


def test_the_rotary_key_has_a_name() -> None:
    assert str(Head(3, 0, "KR")) == "L3KR"
    assert Head.parse("L3KR") == Head.parse("l3kr0") == Head(3, 0, "KR")
    assert Head.parse("L3QR5") == Head(3, 5, "QR")
    with pytest.raises(hs.HeadspanError, match="not a head name"):
        Head.parse("L3KR1")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [("deepseek2", "deepseek_v2"), ("deepseek2", "deepseek_v3-dense-query"), ("minicpm3", "minicpm3"),
     ("mistral4", "mistral4"), ("glm-dsa", "glm_moe_dsa"), ("deepseek32", "deepseek_v32"),
     ("kimi-linear", "kimi_linear")],
)  # fmt: skip
def test_gguf_has_the_same_heads(architecture: str, name: str, split: bool, tmp_path: Path) -> None:
    """Both kinds of files: the maps to keys and values in one tensor, or separate as in current llama.cpp."""
    gguf = pytest.importorskip("gguf")
    build(LATENT[name]).save_pretrained(tmp_path / "hf")
    original = hs.open(str(tmp_path / "hf"))
    source = open_source(tmp_path / "hf")
    known = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    count = original.n_layers
    names = gguf.get_tensor_name_map(known.get(architecture, known["deepseek2"]), count)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_block_count(count)
    writer.add_embedding_length(24)
    writer.add_head_count(N)
    kept = 1 if split else N  # 0 where attention is linear
    hybrid = original.layers != tuple(range(count))
    writer.add_head_count_kv([kept * (layer in original.layers) for layer in range(count)] if hybrid else kept)
    writer.add_kv_lora_rank(12)
    if LATENT[name].config["q_lora_rank"]:
        writer.add_q_lora_rank(10)
    writer.add_rope_dimension_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    if split:
        writer.add_key_length(16)
        writer.add_value_length(12)
        writer.add_key_length_mla(10)
        writer.add_value_length_mla(5)
    else:
        writer.add_key_length(10)
        writer.add_value_length(5)
    for tensor in source.names():
        array = source.read(tensor)
        if split and "kv_b_proj" in tensor:
            both = array.reshape(N, 11, 12)
            layer = tensor.split(".")[2]
            writer.add_tensor(f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(both[:, :6].transpose(0, 2, 1)))
            writer.add_tensor(f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(both[:, 6:]))
            continue
        theirs = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if theirs and "expert" not in tensor and "indexer" not in tensor and "conv1d" not in tensor:
            writer.add_tensor(theirs, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = hs.open(str(tmp_path / "m.gguf"))
    assert stored.ports == original.ports and stored.architecture == original.architecture
    for layer in original.layers:
        for role in "QKVO":
            np.testing.assert_allclose(stored.read(role, layer), original.read(role, layer), atol=1e-6)
        np.testing.assert_allclose(stored.rotary_queries(layer), original.rotary_queries(layer), atol=1e-6)
        ours, theirs = stored.norm(layer), original.norm(layer)
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.gain, theirs.gain)


def test_the_page_has_the_rotary_keys(tmp_path: Path) -> None:
    from headspan.explorer.data import collect

    build(LATENT["youtu"]).save_pretrained(tmp_path)
    weights = hs.open(str(tmp_path))
    page = collect(hs.score(weights, ["pk"], ["OQ", "OK", "OV"]), weights)
    assert page["ports"]["K"][4] == "L0KR" and len(page["ports"]["K"]) == len(page["ranks"]["K"]) == 10
    assert len(page["ports"]["V"]) == 8


def test_scaled_float8_as_deepseek_stores_it(tmp_path: Path) -> None:
    """Float8 matrices with one scale per block: heads are products of the scaled numbers."""
    from safetensors.torch import load_file, save_file

    build(LATENT["deepseek_v2"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name in [n for n in tensors if ("self_attn" in n and n.endswith("proj.weight")) or "with_mqa.weight" in n]:
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // 8), -(-columns // 8)) + 0.5
        spread = scale.repeat_interleave(8, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
        small = (tensors[name] / spread).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = small, scale
        plain[name] = small.float() * spread
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    scaled, expected = hs.open(str(tmp_path)), hs.open(str(tmp_path / "plain"))
    for role in "QKVO":
        np.testing.assert_allclose(scaled.read(role, 1), expected.read(role, 1), atol=1e-6)
    assert scaled.storage_dtypes() == ["float8_e4m3fn"]
