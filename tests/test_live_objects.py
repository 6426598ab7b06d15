"""Objects around a model in memory: compiled, parallel, offloaded, with a tokenizer, with a vision tower."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from families import build
from families_around import AROUND
from headspan.checkpoints.live_tokenizer import live_vocabulary
from headspan.checkpoints.tokenizer import Vocabulary
from test_live_models import BEHAVIOUR, TOKENS, assert_unchanged, base, state, tuned

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

DEMO = Path(hs.__file__).parent / "data" / "demo"
TEXT = "Once upon a time the cat sat on the mat, and then the cat sat on the mat again."


def measures(model: Any) -> list[np.ndarray]:
    found = [hs.score(model, "pk", "OK")["pk", "OK"].values]
    found += hs.effects(model, tokens=TOKENS, draws=0).arrays.values()
    found += hs.observe(model, tokens=TOKENS).arrays.values()
    return found


# -- wrappers ------------------------------------------------------------------------------------------------

AROUND_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "compiled": torch.compile,
    "parallel": torch.nn.DataParallel,
    "both": lambda model: torch.compile(torch.nn.DataParallel(model)),
}


@pytest.mark.parametrize("kind", AROUND_A_MODEL)
@pytest.mark.parametrize("make", [base, tuned], ids=["plain", "peft"])
def test_a_wrapped_model_gives_what_the_model_gives(kind: str, make: Callable[[], Any]) -> None:
    model = make().train()
    before = state(model)
    wrapped = AROUND_A_MODEL[kind](model)
    for one, two in zip(measures(wrapped), measures(copy.deepcopy(model)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert_unchanged(before, model)
    assert hs.open(wrapped).reference == hs.open(model).reference


def test_dropout_gradients_and_the_random_state_stay_as_they_are() -> None:
    model = base("gpt2").train()
    assert model.config.attn_pdrop > 0
    model(input_ids=torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss.backward()
    before, random, numpy_random = state(model), torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = measures(model), measures(model)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)
    hs.task(model, "induction", prompts=2, k=3)
    assert_unchanged(before, model)
    assert torch.equal(random, torch.get_rng_state()) and np.array_equal(numpy_random, np.random.get_state()[1])


class Held(torch.nn.Module):
    """A module of a user's own with a model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = base()


def half_loaded() -> Any:
    model = base()
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.to("meta"))
    return model


def offloaded() -> Any:
    return pytest.importorskip("accelerate").cpu_offload(base(), execution_device="cpu")


def vision() -> Any:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTModel(transformers.ViTConfig(**small, image_size=16, patch_size=8))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "half loaded": (half_loaded, r"1 of its \d+ tensors are on the meta device \(model\.layers\.0\.mlp.* into memory"),
    "offloaded": (offloaded, r"tensors are on the meta device .*Load the whole model into memory"),
    "vision": (vision, r"ViTModel has no embedding of tokens.*Give a transformers"),
    "model inside": (Held, r"of type Held cannot be run.*Give its \.net"),
    "not a tokenizer": (lambda: (base(), "gpt2"), r"a str is not a tokenizer.*Give \(model, tokenizer\)"),
    "wrong order": (lambda: ("gpt2", base()), r"of type tuple cannot be run.*give \(model, tokenizer\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(hs.HeadspanError, match=said):
        hs.behaviour(make(), **BEHAVIOUR)


def test_what_cannot_be_scored_is_refused() -> None:
    assert np.array_equal(
        hs.score(half_loaded(), "pk", "OK")["pk", "OK"].values, hs.score(base(), "pk", "OK")["pk", "OK"].values, True
    ), "its attention weights are loaded"
    with pytest.raises(hs.HeadspanError, match=r"offloaded .*Load the whole model into memory"):
        hs.score(offloaded(), "pk")
    with pytest.raises(hs.HeadspanError, match=r"type Held is not a model.*Give its \.net"):
        hs.score(Held(), "pk")
    quantised = base()
    weight = quantised.model.layers[0].self_attn.q_proj
    weight.weight = torch.nn.Parameter((weight.weight * 99).to(torch.int8), requires_grad=False)
    with pytest.raises(hs.HeadspanError, match=r"holds quantised weights .*give the unquantised model"):
        hs.score(quantised, "pk")


# -- a tokenizer beside the model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return (
        transformers.AutoModelForCausalLM.from_pretrained(DEMO),
        transformers.AutoTokenizer.from_pretrained(DEMO),
    )


def test_a_model_with_its_tokenizer_gives_what_its_directory_gives(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a b c d", "a"], padding=True, truncation=True, max_length=3)  # leaves both set in the backend
    before = tokenizer.backend_tokenizer.to_str()
    assert hs.observe(demo, text=TEXT) == hs.observe("demo", text=TEXT)
    assert hs.tokens(demo, "L0H1", k=3) == hs.tokens((model, tokenizer.backend_tokenizer), "L0H1", k=3)
    assert hs.tokens(demo, "L0H1", k=3) == hs.tokens("demo", "L0H1", k=3)
    one, two = (hs.task(model, "successor", prompts=2, k=3, verify=False) for model in (demo, "demo"))
    assert one.rows() == two.rows()
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_live_vocabulary_is_that_of_the_files(demo: tuple[Any, Any]) -> None:
    live, files = live_vocabulary(demo[1]), Vocabulary.from_directory(DEMO)
    assert live is not None and files is not None
    assert live.encode(TEXT) == files.encode(TEXT) and live.start_id == files.start_id
    assert [live.raw(i) for i in range(live.size)] == [files.raw(i) for i in range(files.size)]
    assert live.special_ids == files.special_ids


def test_a_model_without_tokenizer_says_how_to_give_one(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    for run in (lambda: hs.effects(model, text=TEXT), lambda: hs.task(model, "ioi")):
        with pytest.raises(hs.HeadspanError, match=r"has no tokenizer.*as \(model, tokenizer\)"):
            run()
    with pytest.raises(hs.HeadspanError, match=r"not that of LlamaForCausalLM: it gives the id \d+"):
        hs.effects((base(), tokenizer), text=TEXT)


def test_the_tokenizer_of_a_bridge_is_used(demo: tuple[Any, Any]) -> None:
    found = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge
    bridge = found.boot_transformers(str(DEMO), hf_model=copy.deepcopy(demo[0]), tokenizer=demo[1])
    before = state(bridge)
    # TransformerLens has made this tokenizer put a token before every text; that of the files does not.
    assert hs.observe(bridge, text=TEXT).tokens == hs.observe("demo", text=TEXT, bos="yes").tokens
    assert hs.observe(bridge, text=TEXT, bos="no") == hs.observe("demo", text=TEXT)
    assert hs.tokens(bridge, "L0H1", k=3) == hs.tokens("demo", "L0H1", k=3)
    assert_unchanged(before, bridge)


# -- with a vision tower -------------------------------------------------------------------------------------


def test_a_vision_model_whose_text_model_keeps_a_cache_runs() -> None:
    """LlavaModel does not name `use_cache`, but its text model takes it."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = transformers.CLIPVisionConfig(**small, image_size=16, patch_size=8)
    text = base()
    config = transformers.LlavaConfig(text_config=text.config, vision_config=vision, image_token_index=49)
    whole = transformers.LlavaForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    for one, two in zip(measures(whole), measures(text), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_a_block_that_needs_an_image_is_refused() -> None:
    with pytest.raises(hs.HeadspanError, match=r"for Mllama.*: block 1 does not run on text"):
        hs.effects(build(AROUND["mllama"]), tokens=TOKENS, draws=0)
