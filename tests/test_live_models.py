"""Live models run: PEFT and TransformerLens objects give the numbers of the plain model, and stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import FAMILIES, GPT2, GQA, build
from headspan.checkpoints.plain_models import plain_model
from headspan.running.observe import observe
from headspan.running.opening import running

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS = [[5, 10, 15, 20, 25, 30, 35, 40], [7, 3, 44, 3, 12, 48, 9, 21]]
TARGETS = {"llama": ["q_proj", "k_proj", "v_proj", "o_proj"], "gpt2": ["c_attn", "c_proj"]}
BEHAVIOUR: dict[str, Any] = {"sequences": 2, "length": 6, "vocab_limit": 50}
pytestmark = pytest.mark.filterwarnings("ignore")


def base(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{"llama": GQA, "gpt2": GPT2}[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def lora(kind: str = "llama", **options: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 3, "lora_alpha": 7, "target_modules": TARGETS[kind], "fan_in_fan_out": kind == "gpt2"} | options
    )


def randomised(model: Any) -> Any:
    """Trained-looking adapters: PEFT starts them at zero."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.3)
            elif "lora_" in name or "modules_to_save" in name or "ia3_" in name or "trainable_tokens" in name:
                parameter.normal_(0.3 if "ia3_" in name else 0.0, 0.2)
    return model


def tuned(kind: str = "llama", **options: Any) -> Any:
    return randomised(peft.get_peft_model(base(kind), lora(kind, **options)))


def two_adapters() -> Any:
    model = peft.get_peft_model(base(), lora(), adapter_name="a")
    model.add_adapter("b", lora(r=2, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter(["a", "b"])
    return randomised(model)


def partly_merged() -> Any:
    model = two_adapters()
    model.merge_adapter(["a"])
    return model


def switched_off(model: Any) -> Any:
    model.base_model.disable_adapter_layers()
    return model


def merged_and_switched_off() -> Any:
    model = tuned()
    model.merge_adapter()
    return switched_off(model)


def injected() -> Any:
    """transformers' own way: the model stays a LlamaForCausalLM."""
    model = base()
    model.add_adapter(lora())
    return randomised(model)


def mixed() -> Any:
    model = peft.get_peft_model(base(), lora(), "one", mixed=True)
    model.add_adapter("two", peft.LoHaConfig(r=2, target_modules=["q_proj"], init_weights=False))
    model.set_adapter(["one", "two"])
    return randomised(model)


PEFT: dict[str, Callable[[], Any]] = {
    "llama": tuned,
    "gpt2": lambda: tuned("gpt2"),
    "all linear": lambda: tuned(target_modules="all-linear"),
    "rank-stabilised": lambda: tuned(use_rslora=True),
    "dora": lambda: tuned(use_dora=True),
    "gpt2 dora": lambda: tuned("gpt2", use_dora=True),
    "two adapters": two_adapters,
    "one of two": lambda: (model := two_adapters(), model.set_adapter("b"))[0],
    "partly merged": partly_merged,
    "merged": lambda: (model := tuned(), model.merge_adapter())[0],
    "off": lambda: switched_off(tuned()),
    "merged and off": merged_and_switched_off,
    "saved modules": lambda: tuned(target_modules=["q_proj"], modules_to_save=["k_proj", "embed_tokens"]),
    "saved modules off": lambda: switched_off(tuned(target_modules=["q_proj"], modules_to_save=["k_proj"])),
    "embedding": lambda: tuned(target_modules=["embed_tokens", "v_proj"]),
    "tokens": lambda: tuned(target_modules=["q_proj"], trainable_token_indices=[5, 9, 44]),
    "ia3": lambda: randomised(peft.get_peft_model(base(), peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))),
    "oft": lambda: peft.get_peft_model(base(), peft.OFTConfig(
        target_modules=["q_proj", "o_proj"], oft_block_size=4, init_weights=False)),
    "mixed": mixed,
    "injected": injected,
}  # fmt: skip


def state(model: Any) -> dict[str, Any]:
    """All that must not change: values and objects of tensors, modes, hooks, forwards, settings and adapters."""
    found: dict[str, Any] = {"modules": [(name, id(module)) for name, module in model.named_modules()]}
    for name, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        found[f"{name} tensors"] = [(key, id(value)) for key, value in tensors.items()]
        found[f"{name} values"] = [None if value is None else value.detach().clone() for value in tensors.values()]
        found[f"{name} flags"] = [(value.requires_grad, value.grad) for value in tensors.values() if value is not None]
        found[f"{name} mode"] = module.training, vars(module).get("forward")
        hooks = [value for kind, value in vars(module).items() if kind.endswith("hooks")]  # TransformerLens has lists
        found[f"{name} hooks"] = [list(kept.items()) if isinstance(kept, dict) else copy.copy(kept) for kept in hooks]
        found[f"{name} adapter"] = [
            copy.copy(getattr(module, key, None)) for key in ("_active_adapter", "_disable_adapters", "merged_adapters")
        ]
    found["attention"] = model.config._attn_implementation
    return found


def assert_unchanged(before: dict[str, Any], model: Any) -> None:
    after = state(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key.endswith(" values"):
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(value, after[key], strict=True))
        else:
            assert value == after[key], key


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(TOKENS)).logits


def assert_same_measures(one: Any, two: Any, most: float) -> None:
    first, second = hs.effects(one, tokens=TOKENS, draws=0), hs.effects(two, tokens=TOKENS, draws=0)
    assert first.arrays.keys() == second.arrays.keys()
    for key, values in first.arrays.items():
        np.testing.assert_allclose(values, second.arrays[key], rtol=0, atol=most)
    seen, right = observe(one, tokens=TOKENS, draws=2), observe(two, tokens=TOKENS, draws=2)
    assert seen.arrays.keys() == right.arrays.keys()
    for key, values in seen.arrays.items():
        np.testing.assert_allclose(values, right.arrays[key], rtol=0, atol=most * max(1.0, np.abs(values).max()))
    habits, right_habits = hs.behaviour(one, **BEHAVIOUR), hs.behaviour(two, **BEHAVIOUR)
    for kind in habits:
        np.testing.assert_allclose(habits.arrays[kind], right_habits.arrays[kind], rtol=0, atol=most)


# -- PEFT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PEFT)
def test_the_merged_copy_computes_what_the_peft_model_does(case: str) -> None:
    model = PEFT[case]().eval()
    plain = plain_model(copy.deepcopy(model))
    np.testing.assert_allclose(logits(plain), logits(model), rtol=0, atol=1e-4)
    assert not any(type(module).__module__.startswith("peft.") for module in plain.modules())
    moved = (logits(plain) - logits(base("gpt2" if "gpt2" in case else "llama").eval())).abs().max()
    assert (moved < 1e-4) if case.endswith("off") else (moved > 0.1)


@pytest.mark.parametrize("case", PEFT)
def test_a_peft_model_stays_as_it_is(case: str) -> None:
    model = PEFT[case]().train()
    model.get_input_embeddings().eval()  # a mixture of modes
    before = state(model)
    hs.open(model).provenance  # noqa: B018
    with running(model) as ready:
        assert not ready.model.training
        ready.attentions(torch.tensor(TOKENS))
    assert_unchanged(before, model)


@pytest.mark.parametrize("case", ["llama", "gpt2", "dora", "two adapters", "saved modules"])
def test_a_peft_model_gives_what_its_merged_and_saved_model_gives(case: str, tmp_path: Path) -> None:
    model = PEFT[case]()
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    before = state(model)
    assert_same_measures(model, tmp_path, 1e-6)
    assert_unchanged(before, model)
    opened, saved = hs.open(model), hs.open(tmp_path)
    assert opened.attention_hash() == saved.attention_hash()
    assert opened.fingerprint() == hs.effects(model, tokens=TOKENS, draws=0).model["fingerprint"]
    np.testing.assert_array_equal(
        hs.score(model, metric="pk", pairing="OK")["pk", "OK"].values,
        hs.score(tmp_path, metric="pk", pairing="OK")["pk", "OK"].values,
    )


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_influence_of_a_peft_model(case: str, tmp_path: Path) -> None:
    model = PEFT[case]()
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    found = hs.score(model, metric="influence", pairing="OK", stats=observe(model, tokens=TOKENS))
    right = hs.score(tmp_path, metric="influence", pairing="OK", stats=observe(tmp_path, tokens=TOKENS))
    np.testing.assert_allclose(found["influence", "OK"].values, right["influence", "OK"].values, rtol=1e-5)
    with model.disable_adapter():
        without = observe(model, tokens=TOKENS)
    with pytest.raises(hs.HeadspanError, match="different models"):
        hs.score(model, metric="influence", pairing="OK", stats=without)


def test_disabled_adapters_are_the_base() -> None:
    model, right = tuned(), hs.open(base())
    with model.disable_adapter():
        assert hs.open(model).fingerprint() == right.fingerprint()
        with running(model) as ready:
            assert ready.identity["fingerprint"] == right.fingerprint()
    assert hs.open(model).fingerprint() != right.fingerprint()


def test_only_what_an_adapter_changes_is_copied() -> None:
    model = tuned(target_modules=["q_proj"])
    own = {parameter.data_ptr() for parameter in model.parameters()}
    copied = {name for name, parameter in plain_model(model).named_parameters() if parameter.data_ptr() not in own}
    assert copied == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(model.config.num_hidden_layers)}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PREFIX_TUNING"),
        (peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1), "ADAPTION_PROMPT"),
        (lora(alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"), "LORA"),
    ],
    ids=["prompt", "prefix", "adaption prompt", "activated lora"],
)
def test_what_cannot_be_merged_is_refused(config: Any, kind: str) -> None:
    model = peft.get_peft_model(base(), config)
    for verb in (hs.open, hs.effects, hs.behaviour, observe):
        with pytest.raises(hs.HeadspanError, match=rf"adapter \({kind}\) cannot be merged.*without it"):
            verb(model)
    if kind.startswith("PR"):
        with model.disable_adapter():
            assert hs.open(model).fingerprint() == hs.open(base()).fingerprint()


# -- TransformerLens -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridges(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Bridges over small local models; their tokenizer is GPT-2's class with nothing in it."""
    found = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    folder = tmp_path_factory.mktemp("bridge")
    base("gpt2").save_pretrained(folder)
    tokenizer = found.boot_transformers(str(folder)).tokenizer

    def boot(model: Any) -> Any:
        place = tmp_path_factory.mktemp("bridge")
        model.save_pretrained(place)
        return found.boot_transformers(str(place), hf_model=model, tokenizer=tokenizer)

    return boot


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_bridge_gives_what_its_transformers_model_gives(kind: str, bridges: Callable[..., Any]) -> None:
    bridge, model = bridges(base(kind)), base(kind)
    before = state(bridge)
    assert_same_measures(bridge, model, 0.0)
    assert_unchanged(before, bridge)
    assert hs.open(bridge).attention_hash() == hs.open(model).attention_hash()
    with running(bridge) as ready:
        assert ready.identity == hs.open(bridge).provenance
    found = hs.score(bridge, metric="influence", pairing="OV", stats=observe(bridge, tokens=TOKENS))
    right = hs.score(model, metric="influence", pairing="OV", stats=observe(model, tokens=TOKENS))
    np.testing.assert_array_equal(found["influence", "OV"].values, right["influence", "OV"].values)
    assert_same_measures(bridge.original_model, model, 0.0)  # the model that was wrapped contains the bridge's modules


def test_a_changed_bridge_is_run_as_it_is(bridges: Callable[..., Any]) -> None:
    bridge, model = bridges(base("gpt2")), base("gpt2")
    with torch.no_grad():
        bridge.blocks[0].attn.q.weight.mul_(1.5)
        model.transformer.h[0].attn.c_attn.weight[:, : GPT2["n_embd"]].mul_(1.5)
    assert hs.open(bridge).attention_hash() == hs.open(model).attention_hash()
    assert hs.open(bridge).attention_hash() != hs.open(base("gpt2")).attention_hash()


def test_compatibility_mode(bridges: Callable[..., Any]) -> None:
    unprocessed = bridges(base("gpt2"))
    unprocessed.enable_compatibility_mode(no_processing=True)
    assert hs.open(unprocessed).attention_hash() == hs.open(base("gpt2")).attention_hash()
    assert_same_measures(unprocessed, base("gpt2"), 0.0)
    for rewrite in ("enable_compatibility_mode", "process_weights"):
        wrapped = base("gpt2")
        bridge = bridges(wrapped)
        getattr(bridge, rewrite)()
        assert hs.open(bridge).architecture == "transformer_lens", "its weights can be scored"
        for verb in (hs.effects, hs.behaviour, observe):
            with pytest.raises(hs.HeadspanError, match=r"rewritten the weights.*Boot it again"):
                verb(bridge)
    bridge.enable_compatibility_mode()
    with pytest.raises(hs.HeadspanError, match="rewritten the weights of this GPT2LMHeadModel"):
        hs.effects(wrapped)


def test_a_bridge_over_a_peft_model(bridges: Callable[..., Any]) -> None:
    merged = tuned().merge_and_unload()
    bridge = bridges(tuned().get_base_model())
    assert hs.open(bridge).attention_hash() == hs.open(merged).attention_hash()
    assert_same_measures(bridge, merged, 0.0)


def test_a_native_bridge_is_refused() -> None:
    found = pytest.importorskip("transformer_lens.model_bridge")
    from transformer_lens.config import TransformerBridgeConfig

    config = TransformerBridgeConfig(
        d_model=16, d_head=4, n_layers=2, n_ctx=16, n_heads=4, d_vocab=20, attn_only=True, seed=0
    )
    with pytest.raises(hs.HeadspanError, match="wraps a model of TransformerLens itself"):
        hs.effects(found.TransformerBridge.boot_native(config))


# -- everything else -----------------------------------------------------------------------------------------


def test_opened_weights_run(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    assert_same_measures(hs.open(tmp_path), tmp_path, 0.0)
    for weights in (hs.fold(hs.open(tmp_path)), hs.open(base()), hs.open(tuned())):
        for verb in (hs.effects, hs.behaviour, observe):
            with pytest.raises(hs.HeadspanError, match=r"cannot be run .*Give the model itself"):
                verb(weights)


class HookedTransformer(torch.nn.Module):
    """What TransformerLens 2 and 3 had under this name, as far as it can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg, self.blocks = {"n_layers": 0}, torch.nn.ModuleList()


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (HookedTransformer(), "a HookedTransformer of TransformerLens 2 or 3"),
        (torch.nn.Linear(2, 2), "of type Linear cannot be run"),
        ({"x": 3}, "of type dict cannot be run"),
        (None, "of type NoneType cannot be run"),
        (transformers.LlamaModel, "LlamaModel is a class"),
    ],
    ids=["hooked", "module", "dict", "none", "class"],
)
def test_everything_else_is_refused(thing: Any, said: str) -> None:
    for verb in (hs.effects, hs.behaviour, observe):
        with pytest.raises(hs.HeadspanError) as refused:
            verb(thing)
        assert said in str(refused.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
@pytest.mark.parametrize("kind", ["transformers", "peft", "bridge"])
def test_a_model_stays_as_it_is_if_a_run_fails(kind: str, error: type[BaseException], bridges: Any) -> None:
    model = {"transformers": base, "peft": tuned, "bridge": lambda: bridges(base())}[kind]()
    calls = []

    def fail(module: Any, args: Any, out: Any) -> None:
        calls.append(module)
        if len(calls) > 20:
            raise error

    inner = getattr(model, "original_model", model)
    last = inner.get_submodule("base_model.model.model" if kind == "peft" else "model").layers[1]
    last = getattr(last, "original_component", None) or last
    last.mlp.register_forward_hook(fail) if kind != "bridge" else last.register_forward_hook(fail)
    model.train()
    for module in list(model.modules())[::3]:
        module.training = False
    before = state(model)
    for verb in (hs.effects, observe):
        calls.clear()
        with pytest.raises((error, hs.HeadspanError)):
            verb(model, tokens=TOKENS * 20)
        assert len(calls) > 20, "the hook of the model ran"
        assert_unchanged(before, model)
    with pytest.raises(ZeroDivisionError), running(model):
        raise ZeroDivisionError
    assert_unchanged(before, model)


def test_hooks_that_keep_activations_do_not_stop_a_copy() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def keep(self, module: Any, args: Any, out: Any) -> None:
            self.seen.append(out)

    model, recorder = tuned(), Recorder()
    model.get_base_model().model.layers[0].mlp.register_forward_hook(recorder.keep)
    model(input_ids=torch.tensor(TOKENS))  # with a graph
    assert recorder.seen[0].grad_fn is not None
    found, right = hs.behaviour(model, **BEHAVIOUR), hs.behaviour(tuned(), **BEHAVIOUR)
    for kind in right:
        np.testing.assert_array_equal(found.arrays[kind], right.arrays[kind])
    assert len(recorder.seen) > 1


@pytest.mark.parametrize("make", [tuned, lambda: base().bfloat16()], ids=["peft", "bfloat16"])
def test_a_replaced_forward_is_not_copied(make: Callable[[], Any]) -> None:
    """A function that calls what it replaces would run the modules of the model, not those of the copy."""
    model = make()
    layer = model.get_submodule("base_model.model.model" if make is tuned else "model").layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(hs.HeadspanError, match=r"forward of a module of this .* was replaced"):
        hs.effects(model, tokens=TOKENS)
    assert hs.open(model).attention_hash()


def test_a_replaced_forward_runs_in_the_model_itself() -> None:
    model = base().train()
    layer, calls = model.model.layers[0], []
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    layer.mlp.eval()
    modes = [module.training for module in model.modules()]
    found, right = hs.effects(model, tokens=TOKENS, draws=0), hs.effects(base(), tokens=TOKENS, draws=0)
    assert calls
    for key, values in right.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], values)
    assert modes == [module.training for module in model.modules()]
    assert model.config._attn_implementation == base().config._attn_implementation != "eager"


def test_parts_with_their_own_attention_setting() -> None:
    """CLIP: the text model and the vision model have configs inside the model's."""
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8},
        vision_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8},
    )
    model = transformers.CLIPModel(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before == ["sdpa", "eager", "sdpa"]
    with running(model):
        assert [part._attn_implementation for part in parts] == before, "a copy runs"
    assert [part._attn_implementation for part in parts] == before


def test_compiled_models() -> None:
    model = torch.compile(base(), backend="eager")
    assert hs.open(model).fingerprint() == hs.open(base()).fingerprint()
    assert_same_measures(model, base(), 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_widened_in_a_copy(dtype: str) -> None:
    model = tuned().to(getattr(torch, dtype))
    before = state(model)
    merged = copy.deepcopy(model).merge_and_unload()
    with running(model) as ready:
        assert {parameter.dtype for parameter in ready.model.parameters()} == {torch.float32}
        right = merged.float().base_model.state_dict()
        for name, value in ready.model.state_dict().items():
            assert torch.equal(value, right[name])
        assert ready.identity["fingerprint"] == hs.open(model).fingerprint()
    assert_unchanged(before, model)


def test_saved_modules_in_another_type_than_the_model() -> None:
    model = tuned(target_modules=["q_proj"], modules_to_save=["embed_tokens"]).bfloat16()
    model.get_input_embeddings().float()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    with running(model) as ready:
        assert {parameter.dtype for parameter in ready.model.parameters()} == {torch.float32}
        ready.attentions(torch.tensor(TOKENS))


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "olmo2"])
def test_other_families_as_live_models(family: str, tmp_path: Path) -> None:
    model = build(FAMILIES[family])
    model.save_pretrained(tmp_path)
    assert_same_measures(model, tmp_path, 1e-6)
