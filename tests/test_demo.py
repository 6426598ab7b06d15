"""The model that ships with the package: how it was made, and that its model card is true."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.vocabulary.heads import Head

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from headspan.results.head_scores import BehaviourScores  # noqa: E402
from headspan.running.behaviour import KINDS, attention_patterns  # noqa: E402
from headspan.running.behaviour import behaviour as head_scores  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DEMO = Path(hs.__file__).parent / "data" / "demo"
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def shipped() -> BehaviourScores:
    return BehaviourScores.from_dict(json.loads((DEMO / "behaviour.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def script():
    """examples/train_demo.py as a module (only a checkout has it)."""
    if not EXAMPLES.is_dir():
        pytest.skip("the training script is in the source checkout only")
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_demo

        yield train_demo
    finally:
        sys.path.remove(str(EXAMPLES))


def special_pairs(scores: BehaviourScores, limit: float = 0.6) -> tuple[list[Head], list[Head]]:
    """Previous-token heads of layer 0 and induction heads of layer 1."""
    previous = [Head.parse(h) for h, v in scores["previous_token"].items() if v > limit and h.startswith("L0")]
    induction = [Head.parse(h) for h, v in scores["induction"].items() if v > limit and h.startswith("L1")]
    return previous, induction


# ---------------------------------------------------------------- the shipped model


def test_files_are_small_and_complete() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "behaviour.json"} <= {
        path.name for path in DEMO.iterdir()
    }
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 5_000_000


def test_it_is_exactly_attention_only() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    assert (model.config.n_layer, model.config.n_head) == (2, 8)
    for block in model.transformer.h:
        assert all(not parameter.any() for parameter in block.mlp.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_head_scores_are_those_on_the_card(shipped: BehaviourScores) -> None:
    measured = head_scores("demo")
    assert measured.heads == shipped.heads
    for kind in KINDS:
        np.testing.assert_allclose(measured.arrays[kind], shipped.arrays[kind], atol=1e-3)
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    for head in ("L0H0", "L1H7"):
        assert f"| {head} | " + " | ".join(f"{shipped[k][head]:.3f}" for k in KINDS) + " |" in card


def test_it_has_the_heads_it_was_made_for(shipped: BehaviourScores) -> None:
    previous, induction = special_pairs(shipped)
    assert previous
    assert induction
    assert len(induction) < 8  # the second layer does other things too


def test_projection_kernel_finds_the_circuit(shipped: BehaviourScores) -> None:
    """PK for OK is largest between previous-token and induction heads, and separates them better than CS."""
    previous, induction = special_pairs(shipped)
    scores = hs.score(hs.open("demo"), metric=["pk", "cs"], pairing="OK")
    circuit = {(a, b) for a in previous for b in induction}
    margin = {}
    for metric in ("pk", "cs"):
        matrix = scores[metric, "OK"].forward()
        values = {(matrix.sources[i], matrix.targets[j]): float(v) for i, j, v in zip(*matrix.pairs(), strict=True)}
        inside = np.array([values[pair] for pair in circuit])
        outside = np.array([value for pair, value in values.items() if pair not in circuit])
        margin[metric] = (inside.mean() - outside.mean()) / outside.std()
    best = scores["pk", "OK"].forward().top(1)[0]
    assert (best.source, best.target) in circuit
    assert margin["pk"] > margin["cs"]


def test_tokenizer_reads_words_and_spells_the_rest() -> None:
    vocabulary = hs.open("demo").vocabulary()
    assert vocabulary is not None
    ids = vocabulary.encode("Anna gave the book to Peter.")
    assert [vocabulary.raw(i) for i in ids] == ["▁Anna", "▁gave", "▁the", "▁book", "▁to", "▁Peter", "."]
    spelled = vocabulary.encode("The xylophone")
    assert "".join(vocabulary.raw(i) for i in spelled) == "▁The▁xylophone"
    assert vocabulary.special_ids == {0, 1}


def test_induction_head_attends_after_the_earlier_name(shipped: BehaviourScores) -> None:
    best = shipped.top("induction", 1)[0][0]
    text = "Here is the list: tiger, lamp, violin, cheese. Say it again: tiger, lamp, violin"
    found = attention_patterns("demo", text, [best])
    row = found.patterns[Head.parse(best)][-1]  # from the last word, which preceded "," once
    earlier = found.tokens.index(found.tokens[-1])
    assert int(row.argmax()) == earlier + 1


# ---------------------------------------------------------------- the script that made it


def test_short_training_run_learns_and_saves(script, tmp_path: Path) -> None:
    settings = script.Settings(
        steps=30, d_model=32, n_heads=4, length=64, tokens_per_step=256, corpus_words=20_000, warmup=5,
        learning_rate=1e-2,
    )  # fmt: skip
    lines: list[str] = []
    model, tokenizer, losses = script.train(settings, lines.append)
    assert losses[0] > 0.9 * math.log(tokenizer.get_vocab_size())
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    script.save(model, tokenizer, settings, tmp_path / "model", lines)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], parameter)
    assert len(hs.open(tmp_path / "model").ports.query) == 8
    assert set(json.loads((tmp_path / "model" / "behaviour.json").read_text())) == set(KINDS)


def test_training_is_seeded(script) -> None:
    settings = script.Settings(steps=3, d_model=16, n_heads=2, length=32, tokens_per_step=64, corpus_words=2_000)
    runs = [script.train(settings, lambda line: None)[2] for _ in range(2)]
    assert runs[0] == runs[1]


def test_shipped_tokenizer_is_the_one_of_the_script(script) -> None:
    from tokenizers import Tokenizer

    shipped = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert shipped.get_vocab() == script.build_tokenizer().get_vocab()


def test_tokenizer_reads_back_what_the_text_maker_writes(script) -> None:
    import demo_text

    tokenizer = script.build_tokenizer()
    maker = demo_text.TextMaker(seed=5)
    for _ in range(30):
        words = maker.document()
        encoded = tokenizer.encode(demo_text.write(words))
        assert encoded.tokens == demo_text.pieces(words)


def test_same_seed_writes_the_same_text(script) -> None:
    import demo_text

    one, two, other = (demo_text.TextMaker(seed).document() for seed in (1, 1, 2))
    assert one == two
    assert one != other
