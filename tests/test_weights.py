"""Opening checkpoints and arrays: what is read, what is refused, and with which message."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headspan as hs
from families import FAMILIES, WIDE, build, close, normalise
from headspan.checkpoints.mapping import MappingSource
from headspan.models.arrays import ArrayWeights
from headspan.vocabulary.heads import ROLES, Head, HeadRole, Role

LAYERS, HEADS, KV, D, M = 3, 4, 2, 12, 5


def llama(**changes: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Attention tensors of a small Llama, nothing else, and its config."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.self_attn."
        for name, rows in (("q", HEADS), ("k", KV), ("v", KV)):
            tensors[f"{start}{name}_proj.weight"] = rng.normal(size=(rows * M, D)).astype(np.float32)
        tensors[f"{start}o_proj.weight"] = rng.normal(size=(D, HEADS * M)).astype(np.float32)
    config = {
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": M,
    }  # fmt: skip
    return tensors, {key: value for key, value in (config | changes).items() if value is not None}


class Counting(MappingSource):
    """Tensors in memory that remember which of them were read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[str] = []

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        self.log.append(name)
        return super().read(name, rows)


# -- reading ------------------------------------------------------------------------------------------------


def test_heads_are_cut_out_of_the_tensors() -> None:
    tensors, config = llama()
    weights = hs.open(MappingSource(tensors, config))
    start = "model.layers.2.self_attn."
    np.testing.assert_array_equal(weights.read_head("L2H3.Q"), tensors[start + "q_proj.weight"][15:20].T)
    np.testing.assert_array_equal(weights.read_head("L2KV1.V"), tensors[start + "v_proj.weight"][5:10].T)
    np.testing.assert_array_equal(weights.read_head("L2H1.O"), tensors[start + "o_proj.weight"][:, 5:10])
    assert weights.heads_in("K", 2) == (Head(2, 0, "KV"), Head(2, 1, "KV"))
    assert weights.heads("Q")[-1] == Head(2, 3)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    source = Counting(*llama())
    weights = hs.open(source)
    weights.provenance, weights.tensors(), weights.notes
    assert source.log == []
    weights.read("K", 1)
    assert source.log == ["model.layers.1.self_attn.k_proj.weight"]


def test_a_fused_tensor_is_read_once_for_three_roles() -> None:
    rng = np.random.default_rng(0)
    tensors = {f"h.{i}.attn.{name}.weight": rng.normal(size=(D, columns)).astype(np.float32)
               for i in range(2) for name, columns in (("c_attn", 3 * D), ("c_proj", D))}  # fmt: skip
    source = Counting(tensors, {"model_type": "gpt2", "n_embd": D, "n_layer": 2, "n_head": 3})
    weights = hs.open(source)
    for role in ROLES:
        weights.read(role, 1)
    assert source.log == ["h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight"]
    first, again = weights.read("K", 1), weights.read("K", 1)  # views of the tensor that is kept: nothing is copied
    assert np.shares_memory(first, again)
    with pytest.raises(ValueError, match="read-only"):  # nor can it be spoilt
        first[:] = 0


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_any_prefix_of_the_body(prefix: str) -> None:
    tensors, config = llama()
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    expected = hs.open(MappingSource(tensors, config)).read("V", 1)
    np.testing.assert_array_equal(hs.open(MappingSource(renamed, config)).read("V", 1), expected)


def test_mlp_tensors_may_be_missing_or_corrupt(tmp_path) -> None:
    """Of a saved model only the bytes of attention, norms and embeddings matter."""
    pytest.importorskip("transformers")
    model = build(FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    whole = {role: hs.open(str(tmp_path)).read(role, 1) for role in ROLES}
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name] = np.full_like(tensors[name], np.nan)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)
    weights = hs.open(str(tmp_path))
    for role in ROLES:
        np.testing.assert_array_equal(weights.read(role, 1), whole[role])


def test_reading_a_layer_takes_about_a_layer_of_memory(tmp_path) -> None:
    d, n_layers = 256, 8
    rng = np.random.default_rng(0)
    tensors = {f"h.{i}.attn.{name}.weight": rng.normal(size=(d, columns)).astype(np.float32)
               for i in range(n_layers) for name, columns in (("c_attn", 3 * d), ("c_proj", d))}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gpt2", "n_embd": d, "n_layer": n_layers, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = 4 * d * d * 4
    tracemalloc.start()
    weights = hs.open(str(tmp_path))
    for number in weights.layers:
        for role in ROLES:
            weights.read(role, number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * layer


def test_bfloat16_is_read_exactly() -> None:
    torch = pytest.importorskip("torch")
    tensors, config = llama()
    half = {name: torch.tensor(tensor).to(torch.bfloat16) for name, tensor in tensors.items()}
    weights = hs.open(MappingSource(half, config))
    assert weights.storage_dtype("Q", 0) == "bfloat16"
    expected = half["model.layers.0.self_attn.o_proj.weight"].double().numpy()[:, :M]
    np.testing.assert_array_equal(weights.read("O", 0)[0], expected)
    assert weights.read("O", 0).dtype == np.float32


# -- real models --------------------------------------------------------------------------------------------


def test_real_gpt2(gpt2_dir) -> None:
    weights = hs.open(str(gpt2_dir))
    assert (weights.n_layers, weights.n_heads, weights.d_model, weights.d_head("Q")) == (12, 12, 768, 64)
    assert weights.foldable
    tensors = load_file(gpt2_dir / "model.safetensors")
    prefix = "" if "h.0.attn.c_attn.weight" in tensors else "transformer."
    fused, output = (tensors[f"{prefix}h.4.attn.{name}.weight"] for name in ("c_attn", "c_proj"))
    np.testing.assert_array_equal(weights.read_head("L4H7.Q"), fused[:, 448:512])
    np.testing.assert_array_equal(weights.read_head("L4H7.K"), fused[:, 768 + 448 : 768 + 512])
    np.testing.assert_array_equal(weights.read_head("L4H7.V"), fused[:, 1536 + 448 : 1536 + 512])
    np.testing.assert_array_equal(weights.read_head("L4H7.O"), output[448:512].T)


def test_real_gguf(smollm2_gguf) -> None:
    weights = hs.open(str(smollm2_gguf))
    assert (weights.architecture, weights.n_layers, weights.n_heads, weights.n_kv_heads) == ("llama", 30, 9, 3)
    assert (weights.d_model, weights.d_head("K"), weights.norm_kind) == (576, 64, "rms")
    assert weights.tied_embedding
    assert weights.read("K", 29).shape == (3, 576, 64)
    assert str(weights.heads("K")[0]) == "L0KV0"


def test_real_encoder(minilm_dir) -> None:
    weights = hs.open(str(minilm_dir))
    assert (weights.architecture, weights.n_layers, weights.n_heads, weights.d_model) == ("bert", 6, 12, 384)
    assert not weights.foldable
    assert weights.read("O", 5).shape == (12, 384, 32)


# -- TransformerLens and multimodal models ------------------------------------------------------------------


def hooked_state(n_kv: int, norm: str) -> dict[str, Any]:
    """A state dict as HookedTransformer wrote it: two layers, d_model 16, four heads of size 3."""
    torch = pytest.importorskip("torch")
    shared = "_" if n_kv < 4 else ""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.W_E": (20, 16), "pos_embed.W_pos": (8, 16), "unembed.W_U": (16, 20), "unembed.b_U": (20,),
        "ln_final.w": (16,), "ln_final.b": (16,),
    }  # fmt: skip
    for layer in range(2):
        block = {
            "W_Q": (4, 16, 3), "b_Q": (4, 3), "W_O": (4, 3, 16), "b_O": (16,),
            f"{shared}W_K": (n_kv, 16, 3), f"{shared}b_K": (n_kv, 3),
            f"{shared}W_V": (n_kv, 16, 3), f"{shared}b_V": (n_kv, 3),
        }  # fmt: skip
        shapes |= {f"blocks.{layer}.attn.{name}": shape for name, shape in block.items()}
        shapes |= {f"blocks.{layer}.ln1.w": (16,), f"blocks.{layer}.ln1.b": (16,)}
    torch.manual_seed(0)
    unwanted = {"LN": (), "RMS": ("ln1.b", "ln_final.b"), "LNPre": ("ln1.b", "ln1.w", "ln_final.b", "ln_final.w")}[norm]
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items() if not name.endswith(unwanted)}


@pytest.mark.parametrize("n_kv", [4, 2])
@pytest.mark.parametrize("norm", ["LN", "RMS", "LNPre"])
def test_transformer_lens_state_dict(n_kv: int, norm: str, tmp_path) -> None:
    """TransformerLens converts the state dict and runs it; our weights give the same q, k, v and output."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformer_lens")
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.conversion_utils import convert_tl_checkpoint
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig(
        n_layers=2, d_model=16, n_ctx=8, d_head=3, n_heads=4, n_key_value_heads=n_kv if n_kv < 4 else None,
        d_vocab=20, attn_only=True, normalization_type=norm, seed=0,
    )  # fmt: skip
    state = hooked_state(n_kv, norm)
    model = TransformerBridge.boot_native(config)
    model.load_state_dict(convert_tl_checkpoint(state, config), strict=True)
    torch.save(state, tmp_path / "model.pth")
    weights = hs.open(str(tmp_path / "model.pth"))
    for other in (hs.open(state), hs.open(model)):  # the state dict in memory, and the live model
        for role in ROLES:
            np.testing.assert_array_equal(other.read(role, 1), weights.read(role, 1))
    assert (weights.architecture, weights.n_heads, weights.n_kv_heads) == ("transformer_lens", 4, n_kv)
    with torch.no_grad():
        logits, cache = model.run_with_cache(torch.arange(8)[None])
    seen = {name: tensor.numpy()[0] for name, tensor in cache.items()}
    for layer in weights.layers:
        block = f"blocks.{layer}."
        check = normalise(weights.norm(layer), seen[block + "ln1.hook_in"])
        close(check, seen[block + "attn.q.hook_in"])
        for role in "QKV":
            bias = weights.bias(role, layer)
            assert bias is not None
            vectors = np.einsum("td,hdm->thm", check, weights.read(role, layer)) + bias
            close(vectors, seen[f"{block}attn.hook_{role.lower()}"].reshape(vectors.shape))
        z = seen[block + "attn.hook_z"].reshape(8, 4, 3)
        close(np.einsum("thm,hdm->td", z, weights.read("O", layer)) + weights.bias("O", layer),
              seen[block + "hook_attn_out"])  # fmt: skip
    final = normalise(weights.final_norm(), seen["ln_final.hook_in"])
    close(final @ weights.unembedding().T + weights.unembedding_bias(), logits.numpy()[0])
    np.testing.assert_array_equal(weights.unembedding_rows(3, 7), weights.unembedding()[3:7])


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 24}
MULTIMODAL = {
    "Gemma3": ("gemma3", "", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "Llava": ("llama", "llama", {"vision_config": VISION | {"model_type": "clip_vision_model"}}),
    "SmolVLM": ("llama", "llama", {"vision_config": VISION}),
    "Mistral3": ("mistral", "mistral", {"vision_config": VISION | {"model_type": "pixtral"}}),
    "Qwen2VL": ("qwen2", "", {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2}}),
    "Qwen2_5_VL": ("qwen2", "", {"vision_config": QWEN_VISION}),
    "Qwen3VL": ("qwen3", "", {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": []}}),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_language_model_inside_a_multimodal_one(name: str, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    architecture, text_type, config = MULTIMODAL[name]
    size = WIDE | {"head_dim": 6} | ({"model_type": text_type} if text_type else {})
    config = getattr(transformers, f"{name}Config")(text_config=size, **config)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.save_pretrained(tmp_path)
    weights = hs.open(str(tmp_path))
    assert (weights.architecture, weights.n_heads, weights.n_kv_heads, weights.d_head("Q")) == (architecture, 4, 2, 6)
    state = model.state_dict()
    text = [key for key in state if key.endswith("layers.1.self_attn.k_proj.weight") and state[key].shape == (12, 24)]
    assert len(text) == 1
    expected = state[text[0]].numpy().reshape(2, 6, 24).transpose(0, 2, 1)
    np.testing.assert_array_equal(weights.read("K", 1), expected)
    np.testing.assert_array_equal(weights.unembedding(), model.get_output_embeddings().weight.detach().numpy())


@pytest.mark.parametrize("packed", ["qweight", "weight_scale_inv", "SCB"])
def test_packed_weights_are_refused(packed: str) -> None:
    tensors, config = llama()
    tensors[f"model.layers.0.self_attn.k_proj.{packed}"] = np.ones(3, np.float32)
    with pytest.raises(hs.HeadspanError, match=f"quantised weights .*k_proj.{packed}"):
        hs.open(MappingSource(tensors, config))


def test_only_packed_weights_are_refused_too() -> None:
    tensors, config = llama()
    tensors = {name.replace(".weight", ".qweight"): tensor for name, tensor in tensors.items()}
    with pytest.raises(hs.HeadspanError, match=r"quantised weights .*k_proj.qweight"):
        hs.open(MappingSource(tensors, config))


def test_gemma3_config_that_leaves_out_the_defaults_of_its_class() -> None:
    tensors = {}
    for role, shape in {"q": (2048, 8), "k": (1024, 8), "v": (1024, 8), "o": (8, 2048)}.items():
        tensors[f"language_model.model.layers.0.self_attn.{role}_proj.weight"] = np.ones(shape, np.float32)
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 1}
    weights = hs.open(MappingSource(tensors, {"model_type": "gemma3", "text_config": text}))
    assert (weights.n_heads, weights.n_kv_heads, weights.d_head("Q")) == (8, 4, 256)


def test_gains_of_a_gguf_file_have_their_one_already() -> None:
    tensors, config = llama(model_type="gemma")
    tensors |= {f"model.layers.{i}.input_layernorm.weight": np.full(D, 0.5, np.float32) for i in range(LAYERS)}
    plain, gguf = hs.open(MappingSource(tensors, config)), hs.open(MappingSource(tensors, config | {"_gguf": True}))
    for weights, gain in ((plain, 1.5), (gguf, 0.5)):
        norm = weights.norm(0)
        assert norm is not None
        assert (norm.gain == gain).all()


def test_layers_without_attention_are_left_out_and_keep_their_numbers() -> None:
    tensors, config = llama(num_key_value_heads=[KV, 0, KV])
    tensors = {name: tensor for name, tensor in tensors.items() if ".1." not in name}
    weights = hs.open(MappingSource(tensors, config))
    assert weights.layers == (0, 2)
    assert weights.heads("K")[-1] == Head(2, 1, "KV")
    assert weights.provenance["left_out_layers"] == [1]
    assert any("1 of 3 layers" in note for note in weights.notes)
    with pytest.raises(hs.HeadspanError, match=r"in layer .1.: 2 of its layers"):
        weights.read("Q", 1)


def test_a_projected_embedding_is_not_in_the_stream() -> None:
    """OPT-350M: token vectors are narrower than the stream."""
    tensors, config = llama(tie_word_embeddings=True)
    weights = hs.open(MappingSource(tensors | {"model.embed_tokens.weight": np.ones((9, 6), np.float32)}, config))
    with pytest.raises(hs.HeadspanError, match=r"\(9, 6\)"):
        weights.unembedding()


def test_an_untied_model_without_its_head_has_no_unembedding() -> None:
    tensors, config = llama(tie_word_embeddings=False)
    weights = hs.open(MappingSource(tensors | {"model.embed_tokens.weight": np.ones((9, D), np.float32)}, config))
    assert weights.tied_embedding is None
    assert weights.embedding().shape == (9, D)
    with pytest.raises(hs.HeadspanError, match="lm_head"):
        weights.unembedding()


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "perceiver"}, ["'perceiver'", "gpt2", "llama", '{"Q": Q']),
        ({"model_type": None}, ["no model_type"]),
        ({"num_attention_heads": None}, ["n_heads", "num_attention_heads"]),
        ({"num_attention_heads": 0}, ["num_attention_heads = 0"]),
        ({"num_attention_heads": "4"}, ["'4'"]),
        ({"num_attention_heads": True}, ["True"]),
        ({"num_attention_heads": 10**12}, ["num_attention_heads", "no model is that large"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 key/value"]),
        ({"num_key_value_heads": [2, 1, 2]}, ["layers.1.self_attn.k_proj", "(10, 12)", "(5, 12)", "1 key/value heads"]),
        ({"num_key_value_heads": [2, 2]}, ["n_kv_heads for 2 layers", "has 3"]),
        ({"hidden_size": [12, 12, 12]}, ["d_model layer by layer", "one number"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "no model is that large"]),
        ({"num_hidden_layers": 4}, ["model.layers.3.self_attn.q_proj.weight", "incomplete"]),
        ({"hidden_size": 13}, ["(20, 12)", "(20, 13)", "q_proj"]),
        ({"head_dim": 4}, ["(20, 12)", "(16, 12)"]),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, ["d_head"]),
        ({"kv_lora_rank": 512}, ["latent attention"]),
        ({"model_type": "deepseek_v3"}, ["kv_lora_rank = None", "latent attention"]),
        ({"layer_types": ["mamba"] * 3}, ["no layer with softmax attention"]),
        ({"model_type": "bert"}, ["says it is bert", "attention.self.query"]),
    ],
)  # fmt: skip
def test_bad_configs_are_explained(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(hs.HeadspanError) as caught:
        hs.open(MappingSource(*llama(**changes)))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_tensor_is_named() -> None:
    tensors, config = llama()
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    with pytest.raises(hs.HeadspanError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        hs.open(MappingSource(tensors, config))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("role", ROLES)
def test_a_weight_that_is_not_finite_is_named(value: float, role: Role) -> None:
    tensors, config = llama()
    tensor = tensors[f"model.layers.1.self_attn.{role.lower()}_proj.weight"]
    (tensor if role is not Role.O else tensor.T)[M + 1, 3] = value  # in head 1
    weights = hs.open(MappingSource(tensors, config))
    name = "L1KV1" if role.shared else "L1H1"
    with pytest.raises(hs.HeadspanError, match=f"{role} of head {name} .layer 1."):
        weights.read(role, 1)
    weights.read(role, 0)


def test_large_finite_weights_are_not_mistaken_for_infinite_ones() -> None:
    tensors, config = llama()
    tensors["model.layers.0.self_attn.q_proj.weight"][:] = np.finfo(np.float32).max
    assert np.isfinite(hs.open(MappingSource(tensors, config)).read("Q", 0)).all()


def test_a_head_that_is_not_there() -> None:
    weights = hs.open(MappingSource(*llama()))
    with pytest.raises(hs.HeadspanError, match="L0H9"):
        weights.read_head(HeadRole(Head(0, 9), Role.Q))
    np.testing.assert_array_equal(weights.read_head("L0H0.K"), weights.read_head("L0KV0.K"))  # a shared key head


# -- arrays -------------------------------------------------------------------------------------------------


def arrays(**changes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"Q": (2, 4, 10, 3), "K": (2, 2, 10, 3), "V": (2, 2, 10, 5), "O": (2, 4, 10, 5)} | changes
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def test_arrays_with_shared_heads_and_unequal_sizes() -> None:
    given = arrays()
    for weights in (hs.open(given), hs.open(tuple(given.values())), hs.open(hs.open(given))):
        assert isinstance(weights, ArrayWeights)
        assert [weights.d_head(role) for role in ROLES] == [3, 3, 5, 5]
        assert (weights.n_heads, weights.n_kv_heads, weights.d_model, weights.layers) == (4, 2, 10, (0, 1))
        assert str(weights.heads("V")[-1]) == "L1KV1"
        np.testing.assert_array_equal(weights.read_head("L1H2.O"), given["O"][1, 2])
        assert weights.storage_dtype("Q", 0) == "float64"
        assert weights.bias("Q", 0) is None
        assert not weights.foldable
    assert hs.open(given).fingerprint() == hs.open(arrays()).fingerprint()
    assert hs.open(given).fingerprint() != hs.open({**given, "Q": given["Q"] + 1}).fingerprint()


def test_arrays_with_everything() -> None:
    given = arrays(bQ=(2, 4, 3), bO=(2, 10), gain=(2, 10), gain_bias=(2, 10), final_gain=(10,), final_bias=(10,),
                   unembedding=(7, 10), embedding=(7, 10), unembedding_bias=(7,))  # fmt: skip
    weights = hs.open({**given, "norm": "layer", "eps": 1e-6})
    norm, final, bias = weights.norm(1), weights.final_norm(), weights.bias("Q", 1)
    assert norm is not None
    assert final is not None
    assert bias is not None
    np.testing.assert_array_equal(norm.gain, given["gain"][1])
    np.testing.assert_array_equal(final.bias, given["final_bias"])
    np.testing.assert_array_equal(bias, given["bQ"][1])
    np.testing.assert_array_equal(weights.unembedding(), given["unembedding"])
    assert (norm.kind, norm.eps, weights.vocab_size, weights.foldable) == ("layer", 1e-6, 7, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "got nothing"),
        ({"Q": np.ones(3)}, "four arrays"),
        (arrays() | {"W": np.ones(2)}, "W"),
        (arrays(Q=(4, 10, 3)), r"\(4, 10, 3\)"),
        (arrays(Q=(2, 0, 10, 3)), r"\(2, 0, 10, 3\)"),
        (arrays(O=(2, 4, 11, 5)), "do not fit"),
        (arrays(K=(2, 2, 10, 4)), "do not fit"),
        (arrays(Q=(2, 3, 10, 3), O=(2, 3, 10, 5)), "do not fit"),
        (arrays(bQ=(2, 2, 3)), r"bQ has shape \(2, 2, 3\), expected \(2, 4, 3\)"),
        (arrays(gain=(2, 10)), "norm='layer'"),
        (arrays() | {"norm": "batch"}, "'batch'"),
        (arrays() | {"Q": np.full((2, 4, 10, 3), "x")}, "not real numbers"),
    ],
)  # fmt: skip
def test_bad_arrays_are_explained(given: dict[str, Any], words: str) -> None:
    with pytest.raises(hs.HeadspanError, match=words):
        hs.open(given)


def test_arrays_name_the_head_that_is_not_finite() -> None:
    given = arrays()
    given["V"][1, 0, 2, 2] = np.nan
    with pytest.raises(hs.HeadspanError, match="V of head L1KV0"):
        hs.open(given).read("V", 1)


def test_arrays_without_unembedding() -> None:
    with pytest.raises(hs.HeadspanError, match="unembedding"):
        hs.open(arrays()).unembedding()
