"""Head scores against attention taken directly from transformers, and the labels made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import headspan  # noqa: E402
from headspan.results.head_scores import BehaviourScores  # noqa: E402
from headspan.results.labels import Labels  # noqa: E402
from headspan.running.behaviour import KINDS, attention_patterns  # noqa: E402
from headspan.running.behaviour import behaviour as head_scores  # noqa: E402
from headspan.vocabulary.errors import HeadspanError  # noqa: E402
from headspan.vocabulary.heads import Head  # noqa: E402


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=60,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_positions=64,
                bos_token_id=0,
                eos_token_id=0,
                initializer_range=0.5,
            )
        )
    if family == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
                initializer_range=0.5,
            )
        )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, bos_token_id=0, eos_token_id=0, initializer_range=0.5,
        )
    )  # fmt: skip


def word_tokenizer(words: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([words[0]])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A tiny GPT-2 with a tokenizer of 60 words, w0 special."""
    folder = tmp_path / "tiny"
    tiny("gpt2").save_pretrained(folder)
    word_tokenizer([f"w{i}" for i in range(60)], folder)
    return folder


def direct_attention(model: Any, ids: np.ndarray) -> list[np.ndarray]:
    model.set_attn_implementation("eager")
    model.eval()
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(ids), output_attentions=True)
    return [a.double().numpy() for a in found.attentions]


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_scores_are_the_means_of_diagonals(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / family)
    scores = head_scores(tmp_path / family, sequences=5, length=12, seed=3)
    # the same ids, drawn here from the documented pool: every token that the config does not call special
    special = {"gpt2": {0}, "llama": {1, 2}, "neox": {0}}[family]
    pool = np.array([i for i in range(60) if i not in special])
    drawn = np.random.default_rng(3).choice(pool, size=(5, 12))
    attention = direct_attention(model, np.concatenate([drawn, drawn], axis=1))
    for kind, offset in zip(KINDS, (0, -1, -12, -11), strict=True):
        for layer, maps in enumerate(attention):
            expected = np.diagonal(maps, offset, 2, 3).mean(axis=(0, 2))
            found = [scores[kind][f"L{layer}H{head}"] for head in range(4)]
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(scores["identity"]) == 4 * len(attention)
    assert any("fewer than 20,001" in note for note in scores.notes)


def test_batch_size_does_not_change_scores(gpt2_folder: Path) -> None:
    one, three = (head_scores(gpt2_folder, sequences=7, length=10, batch=b) for b in (1, 3))
    for kind in KINDS:
        np.testing.assert_allclose(one.arrays[kind], three.arrays[kind], atol=1e-6)


def test_large_vocabulary_is_drawn_from_its_first_20001_tokens() -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20_500, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    )
    scores = head_scores(model, sequences=2, length=8)
    assert scores.protocol["vocabulary"] == 20_001
    assert scores.notes == []


def test_live_model_gets_its_settings_back() -> None:
    model = tiny("llama")
    model.train()
    before = model.config._attn_implementation
    assert before != "eager"
    head_scores(model, sequences=2, length=8)
    assert model.config._attn_implementation == before
    assert model.training


def test_special_tokens_are_not_drawn(gpt2_folder: Path) -> None:
    scores = head_scores(gpt2_folder, sequences=1, length=5)
    assert scores.protocol["vocabulary"] == 59


def test_own_text_measures_repeated_tokens(gpt2_folder: Path) -> None:
    text = "w5 w6 w7 w5 w6 w6 w5"
    scores = head_scores(gpt2_folder, text=[text])
    ids = np.array([[5, 6, 7, 5, 6, 6, 5]])
    maps = direct_attention(transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder), ids)[1][0, 2]
    # w5 at 3 and 6, w6 at 4 and 5 occurred before; at 5 the place after the w6 at 4 is 5 itself, which does not count
    duplicate = [maps[3, 0], maps[4, 1], maps[5, 1] + maps[5, 4], maps[6, 0] + maps[6, 3]]
    induction = [maps[3, 1], maps[4, 2], maps[5, 2], maps[6, 1] + maps[6, 4]]
    assert scores["duplicate_token"]["L1H2"] == pytest.approx(np.mean(duplicate), abs=1e-6)
    assert scores["induction"]["L1H2"] == pytest.approx(np.mean(induction), abs=1e-6)
    assert scores["identity"]["L1H2"] == pytest.approx(np.diagonal(maps).mean(), abs=1e-6)
    assert scores["previous_token"]["L1H2"] == pytest.approx(np.diagonal(maps, -1).mean(), abs=1e-6)


def test_text_without_repeats_has_no_induction_score(gpt2_folder: Path) -> None:
    scores = head_scores(gpt2_folder, text=["w1 w2 w3"])
    assert np.isnan(scores["induction"]["L0H0"])
    assert scores.to_dict()["induction"]["L0H0"] is None
    assert scores.top("induction") == []
    assert any("induction" in note for note in scores.notes)


def test_long_text_is_cut_into_windows(gpt2_folder: Path) -> None:
    words = [f"w{1 + i % 50}" for i in range(100)]  # the model takes 64 tokens
    whole = head_scores(gpt2_folder, text=[" ".join(words)])
    parts = head_scores(gpt2_folder, text=[" ".join(words[:64]), " ".join(words[64:])])
    assert any("windows of 64" in note for note in whole.notes)
    np.testing.assert_allclose(whole.arrays["identity"], parts.arrays["identity"], atol=1e-6)


def test_patterns_of_a_sentence(gpt2_folder: Path) -> None:
    found = attention_patterns(gpt2_folder, "w3 w4 w5", ["L2H1"])
    maps = direct_attention(transformers.GPT2LMHeadModel.from_pretrained(gpt2_folder), np.array([[3, 4, 5]]))
    assert found.tokens == ["w3", "w4", "w5"]
    np.testing.assert_allclose(found.patterns[Head(2, 1)], maps[2][0, 1], atol=1e-6)
    with pytest.raises(HeadspanError, match="L9H9"):
        attention_patterns(gpt2_folder, "w3 w4", ["L9H9"])


def test_labels_from_behaviour(tmp_path: Path) -> None:
    heads = tuple(Head(0, i) for i in range(4))
    rising = np.array([0.1, 0.2, 0.3, 0.4])
    scores = BehaviourScores(heads, {"identity": rising, "induction": rising[::-1].copy()})
    best = scores.labels(best=2)
    assert best.heads("identity") == (Head(0, 2), Head(0, 3))
    assert best.heads("induction") == (Head(0, 0), Head(0, 1))
    above = scores.labels(threshold=0.2)
    assert above.heads("identity") == heads[1:]
    assert above.of("L0H1") == ("identity", "induction")


def test_dictionary_round_trip() -> None:
    scores = BehaviourScores((Head(0, 0), Head(3, 1)), {"identity": np.array([0.25, np.nan])})
    again = BehaviourScores.from_dict(json.loads(json.dumps(scores.to_dict())))
    assert again.heads == scores.heads
    np.testing.assert_array_equal(again.arrays["identity"], scores.arrays["identity"])
    with pytest.raises(HeadspanError, match="not head scores"):
        BehaviourScores.from_dict({"identity": {"L0H0": 1.0}, "induction": {}})


def test_grid_has_layers_as_rows(gpt2_folder: Path) -> None:
    scores = head_scores(gpt2_folder, sequences=1, length=5)
    grid = scores.grid("identity")
    assert grid.shape == (3, 4)
    assert grid[2, 1] == scores["identity"]["L2H1"]


# ---------------------------------------------------------------- what cannot be measured


def test_missing_weights_are_an_error_not_random_numbers(gpt2_folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = gpt2_folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "wte" not in n and "h.1.mlp" not in n}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(HeadspanError, match=r"lacks .*wte"):
        head_scores(gpt2_folder, sequences=1, length=5)


def test_sequences_longer_than_the_context(gpt2_folder: Path) -> None:
    with pytest.raises(HeadspanError, match="length of 32 or less"):
        head_scores(gpt2_folder, sequences=1, length=33)


def test_text_without_tokenizer(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    with pytest.raises(HeadspanError, match="no tokenizer"):
        head_scores(tmp_path, text=["some words"])


def test_model_without_attention(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(HeadspanError, match="does not return its attention"):
        head_scores(model, sequences=1, length=5)


def test_things_that_are_not_a_model() -> None:
    with pytest.raises(HeadspanError, match="cannot be run"):
        head_scores(torch.nn.Linear(2, 2))


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.T5Model(config)
    with pytest.raises(HeadspanError, match="encoder-decoder"):
        head_scores(model, sequences=1, length=5)


# ---------------------------------------------------------------- real models


def test_real_attention_only_checkpoint_is_refused(gpt2_dir: Path) -> None:
    from safetensors import safe_open

    with safe_open(gpt2_dir / "model.safetensors", framework="numpy") as file:
        if any(name.endswith("wte.weight") for name in file.keys()):  # noqa: SIM118 - not a dict
            pytest.skip("this GPT-2 directory is complete")
    with pytest.raises(HeadspanError, match="lacks"):
        head_scores(gpt2_dir, sequences=1)


def test_real_gguf_model_has_induction_heads(smollm2_gguf: Path) -> None:
    pytest.importorskip("gguf")
    scores = head_scores(smollm2_gguf, sequences=4)
    assert len(scores["induction"]) == 30 * 9
    assert sum(value > 0.5 for value in scores["induction"].values()) >= 3
    assert scores.top("previous_token", 1)[0][1] > 0.5


def test_real_encoder_can_be_scored(minilm_dir: Path) -> None:
    scores = head_scores(minilm_dir, sequences=2, length=20)
    assert len(scores["identity"]) == 6 * 12
    assert all(0 <= value <= 1 for kind in scores for value in scores[kind].values())


def test_labels_file_is_read_back(tmp_path: Path) -> None:
    from headspan.results.labels import write_labels

    scores = BehaviourScores((Head(0, 0), Head(1, 0)), {"induction": np.array([0.1, 0.9])})
    write_labels(scores.labels(best=1), tmp_path / "labels.csv")
    assert Labels.load(tmp_path / "labels.csv").heads("induction") == (Head(1, 0),)


# ---------------------------------------------------------------- the command


def run(*arguments: str) -> Any:
    from typer.testing import CliRunner

    from headspan.cli import app

    return CliRunner().invoke(app, ["behaviour", *arguments])


def test_command_prints_json_and_writes_files(gpt2_folder: Path, tmp_path: Path) -> None:
    out, labels = tmp_path / "behaviour.json", tmp_path / "labels.csv"
    done = run(
        str(gpt2_folder), "--sequences", "2", "--length", "8", "--json",
        "--out", str(out), "--labels-out", str(labels), "--best", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    measured = head_scores(gpt2_folder, sequences=2, length=8)
    assert json.loads(done.stdout) == measured.rows()
    printed = json.loads(out.read_text())
    assert printed.pop("_model")["fingerprint"] == headspan.open(gpt2_folder).fingerprint()
    assert printed == measured.to_dict()
    written = Labels.load(labels)
    assert written.names == KINDS
    best = sorted(printed["induction"], key=lambda head: -printed["induction"][head])[:2]
    assert set(written.heads("induction")) == set(map(Head.parse, best))


def test_command_stores_scores_in_a_result(gpt2_folder: Path, tmp_path: Path) -> None:
    import headspan as hs

    path = tmp_path / "result.safetensors"
    hs.score(hs.open(gpt2_folder), metric=["pk"], pairing="OK").save(path)
    before = hs.load(path)["pk", "OK"].values
    done = run(str(gpt2_folder), "--sequences", "2", "--length", "8", "--into", str(path))
    assert done.exit_code == 0, done.output
    after = hs.load(path)
    np.testing.assert_array_equal(after["pk", "OK"].values, before)
    assert after.annotations["behaviour"] == head_scores(gpt2_folder, sequences=2, length=8).to_annotation()


def test_command_refuses_a_result_of_another_model(gpt2_folder: Path, tmp_path: Path) -> None:
    import headspan as hs

    tiny("llama").save_pretrained(tmp_path / "llama")
    path = tmp_path / "result.safetensors"
    hs.score(hs.open(tmp_path / "llama"), metric=["pk"], pairing="OK").save(path)
    done = run(str(gpt2_folder), "--sequences", "1", "--length", "8", "--into", str(path))
    assert isinstance(done.exception, HeadspanError)
    assert "different models" in str(done.exception)
    assert "behaviour" not in hs.load(path).annotations


def test_command_measures_a_text_file(gpt2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w3 w4 w3 w4")
    done = run(str(gpt2_folder), "--text", str(tmp_path / "text.txt"), "--prompt", "w7 w8", "--json")
    expected = head_scores(gpt2_folder, text=["w3 w4 w3 w4", "w7 w8"]).rows()
    assert json.loads(done.stdout) == expected


def test_command_csv_lists_every_head(gpt2_folder: Path) -> None:
    done = run(str(gpt2_folder), "--sequences", "1", "--length", "8", "--csv")
    lines = done.stdout.splitlines()
    assert lines[0] == "head,identity,previous_token,duplicate_token,induction"
    assert len(lines) == 1 + 12


def test_command_wants_one_way_to_choose_labels(gpt2_folder: Path, tmp_path: Path) -> None:
    done = run(str(gpt2_folder), "--best", "3", "--threshold", "0.5", "--labels-out", str(tmp_path / "l.csv"))
    assert "only one of them" in str(done.exception)
    assert "--labels-out" in str(run(str(gpt2_folder), "--best", "3").exception)
