"""Tokens of a head against a direct projector in float64, and the table of norms against plain loops."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import headspan
from headspan.cli import app
from headspan.models.arrays import ArrayWeights
from headspan.models.weights import AttentionWeights
from headspan.reading.token_lengths import PREPROCESSINGS
from headspan.reading.tokens import all_tokens, norm_correlations, random_best, unembedding_cosines
from headspan.reading.tokens import tokens as head_tokens
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, HeadRole, Role

Array = NDArray[Any]
D, M, VOCAB = 24, 5, 211


def arrays(norm: str | None = "layer", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A small model with grouped heads, whose vocabulary has a common direction as real ones have."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        **{role: rng.normal(size=(2, 4, D, M)) for role in "QO"},
        **{role: rng.normal(size=(2, 2, D, M)) for role in "KV"},
        "unembedding": rng.normal(size=(VOCAB, D)) * rng.uniform(0.5, 2, size=(VOCAB, 1)) + rng.normal(size=D),
    }
    if norm is not None:
        found |= {"norm": norm, "final_gain": rng.uniform(0.5, 2, size=D), "gain": rng.uniform(0.5, 2, size=(2, D))}
    if norm == "layer":
        found["final_bias"] = rng.normal(size=D)
    return found | changes


def preprocessed(rows: Array, preprocess: str) -> Array:
    rows = rows.astype(np.float64)
    if "centre" in preprocess:
        rows = rows - rows.mean(axis=0)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if "normalise" in preprocess else rows


def normed(weights: AttentionWeights, columns: Array) -> Array:
    """LN_final of every column, column by column."""
    norm, columns = weights.final_norm(), columns.astype(np.float64)
    if norm is None:
        return columns
    out = []
    for column in columns.T:
        x = column - column.mean() if norm.kind == "layer" else column
        x = x / np.sqrt((x**2).mean() + norm.eps) * norm.gain
        out.append(x if norm.bias is None else x + norm.bias)
    return np.stack(out, axis=1)


def direct_scores(tilde: Array, rows: Array, preprocess: str) -> Array:
    """‖P̃ f(e)‖ with P̃ = W̃(W̃ᵀW̃)⁻¹W̃ᵀ written out."""
    projector = tilde @ np.linalg.inv(tilde.T @ tilde) @ tilde.T
    return np.linalg.norm(preprocessed(rows, preprocess) @ projector.T, axis=1)


def scores_by_id(weights: AttentionWeights, head: str, role: str, preprocess: str = "centre-normalise") -> Array:
    found = head_tokens(weights, head, role, k=VOCAB, preprocess=preprocess)
    return np.array([token.score for token in sorted(found)])


@pytest.mark.parametrize("preprocess", PREPROCESSINGS)
@pytest.mark.parametrize("norm", ["layer", "rms", None])
def test_scores_equal_the_direct_projector(norm: str | None, preprocess: str) -> None:
    weights = ArrayWeights(arrays(norm))
    for name in ("L0H0.Q", "L1KV1.K", "L0KV0.V", "L1H3.O"):
        head, role = HeadRole.parse(name)
        expected = direct_scores(normed(weights, weights.read_head(name)), weights.unembedding(), preprocess)
        found = scores_by_id(weights, str(head), str(role), preprocess)
        np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_folded_weights_are_read_as_they_are(norm: str) -> None:
    plain = ArrayWeights(arrays(norm))
    weights = headspan.fold(plain)
    # W_O' and the gain-free norm against the folded unembedding. For LayerNorm C_d W_O has mean 0 columns already.
    expected = direct_scores(normed(weights, weights.read_head("L1H2.O")), weights.unembedding(), "centre-normalise")
    np.testing.assert_allclose(scores_by_id(weights, "L1H2", "O"), expected, rtol=1e-4)
    assert not np.allclose(expected, scores_by_id(plain, "L1H2", "O"), rtol=1e-2)


def save_model(family: str, directory: Path) -> Any:
    """A random model of a family with norms that are not trivial, and a tokenizer smaller than its vocabulary."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    common: dict[str, Any] = {"vocab_size": 300, "tie_word_embeddings": family != "llama"}
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **common)
    else:
        config = {"llama": transformers.LlamaConfig, "gemma": transformers.GemmaConfig}[family](**sizes, **common)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_f" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma"])
def test_scores_with_the_models_own_final_norm_and_head(family: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = save_model(family, tmp_path)
    weights = headspan.open(str(tmp_path))
    final = model.transformer.ln_f if family == "gpt2" else model.model.norm
    with torch.no_grad():
        tilde = final(torch.from_numpy(weights.read_head("L1H2.O")).T).T.double().numpy()
        rows = model.lm_head.weight.double().numpy()
    expected = direct_scores(tilde, rows, "centre-normalise")
    found = head_tokens(weights, "L1H2", "O", k=300)
    assert sorted(token.id for token in found) == list(range(300))
    np.testing.assert_allclose([token.score for token in found], expected[[t.id for t in found]], rtol=1e-4)
    padded = [token.token for token in found if token.id >= 256]
    assert all(text.startswith("<id ") for text in padded)
    assert not any(token.token.startswith("<id ") for token in found if token.id < 256)


@pytest.mark.slow
def test_scores_of_a_real_model_equal_the_direct_projector(smollm2_gguf: Path) -> None:
    pytest.importorskip("gguf")
    weights = headspan.open(str(smollm2_gguf))
    rows = weights.unembedding()
    for name in ("L3H4.Q", "L14H0.O", "L29KV2.V"):
        head, role = HeadRole.parse(name)
        expected = direct_scores(normed(weights, weights.read_head(name)), rows, "centre-normalise")
        found = head_tokens(weights, head, role, k=20)
        assert [token.id for token in found[:10]] == list(np.argsort(-expected, kind="stable")[:10])
        np.testing.assert_allclose([token.score for token in found], np.sort(expected)[::-1][:20], rtol=1e-5)


def test_a_real_final_layernorm_with_bias(iglm_dir: Path) -> None:
    pytest.importorskip("torch")
    weights = headspan.open(str(iglm_dir))
    norm = weights.final_norm()
    assert norm is not None
    assert norm.bias is not None
    expected = direct_scores(normed(weights, weights.read_head("L2H5.O")), weights.unembedding(), "centre-normalise")
    found = head_tokens(weights, "L2H5", "O", k=5)
    np.testing.assert_allclose([token.score for token in found], np.sort(expected)[::-1][:5], rtol=1e-5)
    assert found[0].token == f"<id {found[0].id}>"  # the checkpoint comes without a tokenizer


# -- what the scores do and do not depend on ---------------------------------------------------------------------


def changed_basis(given: dict[str, Any], change: Array) -> ArrayWeights:
    return ArrayWeights({**given, "O": given["O"] @ change})


def general_change(seed: int = 5) -> Array:
    return np.random.default_rng(seed).normal(size=(M, M))


@pytest.mark.parametrize("norm", ["rms", None, "layer without bias"])
def test_without_a_bias_the_basis_inside_a_head_does_not_matter(norm: str | None) -> None:
    given = arrays(norm and norm.split()[0])
    given.pop("final_bias", None)
    before = scores_by_id(ArrayWeights(given), "L1H1", "O")
    np.testing.assert_allclose(scores_by_id(changed_basis(given, general_change()), "L1H1", "O"), before, rtol=1e-4)


def test_with_a_bias_only_order_and_positive_scale_of_columns_do_not_matter() -> None:
    given = arrays("layer", eps=1e-12)
    before = scores_by_id(ArrayWeights(given), "L1H1", "O")
    scale = np.diag([0.5, 3.0, 1.0, 2.0, 7.0])[:, [3, 1, 0, 4, 2]]
    np.testing.assert_allclose(scores_by_id(changed_basis(given, scale), "L1H1", "O"), before, rtol=1e-4)
    for other in (general_change(), np.diag([-1.0, 1, 1, 1, 1])):
        after = scores_by_id(changed_basis(given, other), "L1H1", "O")
        assert np.abs(after - before).max() > 0.01


def test_the_bias_is_in_every_column_so_a_basis_change_after_the_norm_does_not_matter() -> None:
    weights = ArrayWeights(arrays("layer"))
    tilde = normed(weights, weights.read_head("L0H1.O"))
    for basis in (tilde, tilde @ general_change()):
        expected = direct_scores(basis, weights.unembedding(), "centre-normalise")
        np.testing.assert_allclose(scores_by_id(weights, "L0H1", "O"), expected, rtol=2e-5)


# -- all heads at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["1GiB", 30_000])
def test_all_heads_at_once_equal_one_by_one(memory: int | str) -> None:
    weights = ArrayWeights(arrays())
    calls: list[tuple[int, int]] = []
    found = all_tokens(weights, k=7, progress=lambda done, total: calls.append((done, total)), memory=memory)
    assert [(f.role, f.head) for f in found] == [(role, head) for role in ROLES for head in weights.heads(role)]
    for entry in found:
        alone = head_tokens(weights, entry.head, entry.role, k=7)
        assert [t.id for t in entry.tokens] == [t.id for t in alone]
        np.testing.assert_allclose([t.score for t in entry.tokens], [t.score for t in alone], rtol=1e-5)
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == (VOCAB * 24, VOCAB * 24)


def test_memory_stays_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    given = {role: rng.normal(size=(6, 4, 64, 16)).astype(np.float32) for role in "QKVO"}
    given["unembedding"] = rng.normal(size=(20_000, 64)).astype(np.float32)
    weights = ArrayWeights(given)
    whole_product = 20_000 * 24 * 16 * 4
    tracemalloc.start()
    try:
        all_tokens(weights, ["O"], memory=2_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000 < whole_product / 7


def test_random_best_is_what_random_tokens_reach() -> None:
    rng = np.random.default_rng(0)
    best = []
    for _ in range(60):
        given = {role: rng.normal(size=(1, 1, 64, 8)) for role in "QKVO"}
        weights = ArrayWeights({**given, "unembedding": rng.normal(size=(1000, 64))})
        best.append(head_tokens(weights, "L0H0", "O", k=1, preprocess="normalise")[0].score)
    assert random_best(64, 8, 1000) == pytest.approx(np.median(best), abs=0.02)
    assert random_best(8, 8, 1000) == 1


def test_equal_scores_come_in_order_of_ids() -> None:
    given = arrays(None)
    given["unembedding"] = np.repeat(given["unembedding"][:3], 50, axis=0)
    ids = [t.id for t in head_tokens(ArrayWeights(given), "L0H0", "Q", k=60, preprocess="normalise")]
    assert ids[:50] == list(range(ids[0], ids[0] + 50))
    assert ids[50:] == list(range(ids[50], ids[50] + 10))


def test_a_head_without_full_rank_and_a_zero_token() -> None:
    given = arrays(None)
    given["O"][0, 0, :, 1:] = given["O"][0, 0, :, :1]
    given["unembedding"][7] = 0
    weights = ArrayWeights(given)
    scores = scores_by_id(weights, "L0H0", "O", "normalise")
    line = given["O"][0, 0, :, 0] / np.linalg.norm(given["O"][0, 0, :, 0])
    rows = given["unembedding"] / np.maximum(np.linalg.norm(given["unembedding"], axis=1, keepdims=True), 1e-30)
    np.testing.assert_allclose(scores, np.abs(rows @ line), atol=1e-6)
    assert scores[7] == 0


# -- the table of norms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["1GiB", 30_000])
def test_norm_table_equals_plain_loops(memory: int | str) -> None:
    from scipy.stats import spearmanr

    weights = ArrayWeights(arrays())
    rows = weights.unembedding().astype(np.float64)
    table = norm_correlations(weights, memory=memory)
    assert list(table) == ["identity", "centre", "normalise", "centre_normalise"]
    for name, by_role in table.items():
        lengths = np.linalg.norm(rows - rows.mean(axis=0) if "centre" in name else rows, axis=1)
        everything = []
        for role in ROLES:
            expected = [
                spearmanr(
                    lengths, direct_scores(normed(weights, weights.read_head(HeadRole(head, role))), rows, name)
                ).statistic
                for head in weights.heads(role)
            ]
            everything += expected
            assert by_role[role.value] == pytest.approx((np.mean(expected), np.std(expected)), abs=1e-5)
        assert by_role["all"] == pytest.approx((np.mean(everything), np.std(everything)), abs=1e-5)


def test_cosines_of_the_unembedding() -> None:
    weights = ArrayWeights(arrays())
    rows = weights.unembedding().astype(np.float64)
    norm = weights.final_norm()
    assert norm is not None
    assert norm.bias is not None

    def cosine(a: Array, b: Array) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    mean = rows.mean(axis=0)
    assert unembedding_cosines(weights) == pytest.approx(
        {
            "e_with_mean": np.mean([cosine(row, mean) for row in rows]),
            "e_with_beta_final": np.mean([cosine(row, norm.bias) for row in rows]),
            "mean_with_beta_final": cosine(mean, norm.bias),
        },
        abs=1e-6,
    )
    assert unembedding_cosines(ArrayWeights(arrays("rms")))["e_with_beta_final"] is None


# -- bad input and the command line -------------------------------------------------------------------------------


def test_without_unembedding_a_message(gpt2_dir: Path) -> None:
    if (gpt2_dir / "tokenizer.json").exists():
        pytest.skip("this is a complete GPT-2")
    weights = headspan.open(str(gpt2_dir))
    for ask in (lambda: head_tokens(weights, "L10H6"), lambda: all_tokens(weights), lambda: norm_correlations(weights)):
        with pytest.raises(HeadspanError, match="no unembedding"):
            ask()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "L9H0"}, "no head L9H0"),
        ({"head": "L0H9", "role": "K"}, "no head L0H9 with the role K"),
        ({"head": "L0H0", "role": "X"}, "unknown role"),
        ({"head": "L0H0", "preprocess": "whiten"}, "unknown preprocessing"),
        ({"head": "L0H0", "k": 0}, "at least 1"),
    ],
)
def test_bad_requests_give_a_message(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadspanError, match=message):
        head_tokens(ArrayWeights(arrays()), **arguments)


def test_a_damaged_unembedding_names_the_token() -> None:
    given = arrays()
    given["unembedding"][17, 3] = np.nan
    with pytest.raises(HeadspanError, match="token 17"):
        head_tokens(ArrayWeights(given), "L0H0")


def test_command_line(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    weights = headspan.open(str(tmp_path))

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["tokens", str(tmp_path), *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    expected = [{"head": "L1H2", "role": "O", **row} for row in head_tokens(weights, "L1H2", "O", 4).rows()]
    assert json.loads(run("L1H2", "--role", "O", "--top", "4", "--json")) == expected
    assert json.loads(run("L1H2.O", "--top", "4", "--json")) == expected
    everything = json.loads(run("--all", "--top", "3", "--json"))
    assert len(everything) == 2 * (4 + 2 + 2 + 4) * 3
    assert [row["head"] for row in everything[-3:]] == ["L1H3"] * 3
    last = [{name: row[name] for name in ("id", "token", "score")} for row in everything[-3:]]
    assert last == [t._asdict() for t in all_tokens(weights, [Role.O], 3)[-1].tokens]
    assert len(run("--all", "--role", "K", "--top", "3", "--csv").splitlines()) == 1 + 4 * 3
    assert run("L1H2", "--csv").splitlines()[0] == "head,role,rank,id,token,score"
    norms = json.loads(run("--norms", "--json"))
    assert [row["mean"] for row in norms if row["quantity"] == "cosine_e_with_beta_final"] == [None]
    assert [row["role"] for row in norms if row["preprocess"] == "identity"] == ["Q", "K", "V", "O", "all"]
    for wrong in ([], ["L1H2", "--all"], ["L1H2.O", "--role", "K"], ["L1H2", "--preprocess", "none"]):
        with pytest.raises(HeadspanError):
            CliRunner().invoke(app, ["tokens", str(tmp_path), *wrong], catch_exceptions=False)


@pytest.mark.slow
def test_lists_in_the_documentation_are_what_the_model_gives(smollm2_gguf: Path) -> None:
    pytest.importorskip("gguf")
    text = (Path(__file__).parents[1] / "docs" / "reading-heads.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(L\d+(?:H|KV)\d+)\.([QKVO]) +(0\.\d\d)  (.*)$", text, re.MULTILINE)
    assert len(shown) > 50
    weights = headspan.open(str(smollm2_gguf))
    for head, role, score, tokens in shown[::14]:
        found = head_tokens(weights, head, role)
        assert float(score) == pytest.approx(found[0].score, abs=0.006)
        # Scores that differ only by rounding may change places on another machine.
        assert set(tokens.split(" ")) == {token.token for token in found}
