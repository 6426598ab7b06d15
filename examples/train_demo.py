"""Train the small model that ships with headspan: two attention-only layers of eight heads.

    python examples/train_demo.py --out my-demo            # the shipped settings, about 6 minutes on two cores
    python examples/train_demo.py --out short --steps 100  # a quick look
    python examples/train_demo.py --out my-demo --checkpoints series   # and 40 models on the way, for headspan track

The result is an ordinary Hugging Face directory of type ``gpt2``. Its MLPs have width one and weights that
are zero and frozen, so it computes exactly what an attention-only transformer computes: token and position
embedding, two blocks of LayerNorm and attention, final LayerNorm, unembedding tied to the embedding.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demo_text import SPECIAL, SPELLING, TextMaker, pieces, word_list

from headspan.results.head_scores import BehaviourScores
from headspan.running.behaviour import behaviour

Log = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the trained weights."""

    seed: int = 0
    steps: int = 2200
    d_model: int = 256
    n_layers: int = 2
    n_heads: int = 8
    length: int = 256
    tokens_per_step: int = 2048
    corpus_words: int = 500_000
    learning_rate: float = 2e-3
    embedding_rate: float = 0.5  # of the learning rate: words that mean alike must stay tellable apart
    warmup: int = 50
    weight_decay: float = 0.1
    init: float = 0.06  # standard deviation of the random attention weights: 1/√d_model
    embedding_init: float = 0.02  # of words and positions: small, so that what heads write is heard above them
    final_gain: float = 3.0  # of the last LayerNorm at first, which makes up for it in the logits
    primed_heads: int = 3  # heads of the first layer that start with a leaning towards the previous token
    quoted: float = 0.1  # share of the stories in which a passage is quoted again


class Stage(NamedTuple):
    """A part of the training: sequences get longer, random words give way to stories."""

    until: float  # part of all steps that are done when it ends
    length: int  # tokens of a sequence, placed anywhere in the context
    repeats: float  # share of random words said again: look for what followed this word before


COURSE = (Stage(0.2, 32, 0.5), Stage(0.35, 64, 0.15), Stage(0.6, 128, 0.08), Stage(1.0, 256, 0.05))


def build_tokenizer() -> Any:
    """Whole words with their leading space; anything else is spelled letter by letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelled = [(letter, -20.0) for letter in ["▁", *SPELLING]]
    vocabulary = [(s, 0.0) for s in SPECIAL] + spelled + [("▁" + word, -5.0) for word in word_list()]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def build_model(settings: Settings, vocab_size: int) -> Any:
    """GPT-2 with MLPs that are, and stay, exactly zero."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size, n_positions=settings.length, n_embd=settings.d_model, n_layer=settings.n_layers,
        n_head=settings.n_heads, n_inner=1, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False, initializer_range=settings.init,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # waves, at the size of the token embedding: neighbours are a rotation apart from the start
        model.transformer.wpe.weight.copy_(
            waves(settings.length, settings.d_model) * settings.embedding_init * math.sqrt(2)
        )
        model.transformer.wte.weight.normal_(0.0, settings.embedding_init)
        model.transformer.ln_f.weight.fill_(settings.final_gain)
        for head in range(settings.primed_heads):
            prime_for_previous_token(model.transformer.h[0].attn.c_attn.weight, head, settings)
    for block in model.transformer.h:
        for part in (block.mlp, block.ln_2):
            part.requires_grad_(False)
        for parameter in block.mlp.parameters():
            parameter.zero_()
    return model


def waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of positions, wavelengths from 2π to 2000π tokens: where learned positions start."""
    angles = torch.arange(length)[:, None] * torch.logspace(0, -3, width // 2)[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def prime_for_previous_token(c_attn: torch.Tensor, head: int, settings: Settings) -> None:
    """Add to a head's query and key weights a leaning towards the token before: a start, which training may undo.

    Keys get (sin ωs, cos ωs) of their position, queries (sin ω(t−1), cos ω(t−1)), which is a rotation of their own; the
    product is largest where s = t − 1. Training does undo it: these heads end as identity heads, and others become
    previous-token heads. But with it induction begins after 300 steps; without it, it had not after 950.
    """
    d, m = settings.d_model, settings.d_model // settings.n_heads
    gain = 1.0 + 0.5 * head
    for i in range(m // 2):
        wave = 2 * i + head % 2
        turn = torch.logspace(0, -3, d // 2)[wave]
        sine, cosine, first = wave, d // 2 + wave, head * m + 2 * i
        c_attn[sine, d + first] += gain
        c_attn[cosine, d + first + 1] += gain
        c_attn[sine, first] += gain * torch.cos(turn)
        c_attn[cosine, first] -= gain * torch.sin(turn)
        c_attn[cosine, first + 1] += gain * torch.cos(turn)
        c_attn[sine, first + 1] += gain * torch.sin(turn)


class Batches:
    """Training sequences: stories, and random words said again."""

    def __init__(self, settings: Settings, tokenizer: Any) -> None:
        self.settings = settings
        self.rng = np.random.default_rng(settings.seed)
        self.vocab_size = tokenizer.get_vocab_size()
        self.corpus = encode_corpus(TextMaker(settings.seed), tokenizer, settings.corpus_words)
        self.held_out = encode_corpus(TextMaker(settings.seed + 1), tokenizer, 64 * settings.length)

    def sequence(self, length: int, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels; words that nothing could predict have label -100 (no loss)."""
        return self.repeat(length) if self.rng.random() < stage.repeats else self.story(length)

    def repeat(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Random words repeated over and over: only looking back predicts the next word."""
        span = int(length / 2 ** self.rng.uniform(1, 2))
        ids = np.resize(self.rng.integers(len(SPECIAL), self.vocab_size, size=span), length)
        return ids, np.where(np.arange(length) < span, -100, ids)

    def story(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A window of the text; in some of them a passage is quoted again."""
        start = self.rng.integers(len(self.corpus) - length)
        ids = self.corpus[start : start + length].copy()
        if self.rng.random() < self.settings.quoted:
            span = int(self.rng.integers(2, length // 3))
            source = int(self.rng.integers(0, length - 2 * span))
            target = int(self.rng.integers(source + span, length - span + 1))
            ids[target : target + span] = ids[source : source + span]
        return ids, ids

    def next(self, step: int) -> dict[str, torch.Tensor]:
        """One batch as the model's arguments."""
        settings = self.settings
        stage = next(stage for stage in COURSE if step < stage.until * settings.steps)
        length = min(stage.length, settings.length)
        rows = max(1, settings.tokens_per_step // length)
        ids, labels = zip(*(self.sequence(length, stage) for _ in range(rows)), strict=True)
        starts = self.rng.integers(0, settings.length - length + 1, size=(rows, 1))
        batch = {"input_ids": np.stack(ids), "labels": np.stack(labels), "position_ids": starts + np.arange(length)}
        return {name: torch.from_numpy(value) for name, value in batch.items()}


def encode_corpus(maker: TextMaker, tokenizer: Any, words: int) -> np.ndarray:
    """Whole documents, end to end, as token ids (at least ``words`` of them)."""
    ids = tokenizer.get_vocab()
    found: list[int] = []
    while len(found) < words:
        found += [ids[piece] for piece in pieces(maker.document())]
    return np.array(found, dtype=np.int64)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def optimiser_for(model: Any, settings: Settings) -> torch.optim.Optimizer:
    """AdamW with weight decay on the attention matrices only; ``rate`` multiplies the learning rate of a group."""
    groups: dict[str, list[Any]] = {"matrices": [], "embeddings": [], "rest": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = name.endswith(("c_attn.weight", "c_proj.weight"))
            groups["matrices" if matrix else "embeddings" if "wte" in name else "rest"].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups["matrices"], "weight_decay": settings.weight_decay, "rate": 1.0},
            {"params": groups["embeddings"], "weight_decay": 0.0, "rate": settings.embedding_rate},
            {"params": groups["rest"], "weight_decay": 0.0, "rate": 1.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
    )


@torch.no_grad()
def held_out_losses(model: Any, batches: Batches) -> tuple[float, float]:
    """Mean loss on stories that are not in the training text, and on random words said a second time."""
    length, rng = batches.settings.length, np.random.default_rng(1)
    stories = torch.from_numpy(batches.held_out[: 8 * length].reshape(8, length))
    once = torch.from_numpy(rng.integers(len(SPECIAL), batches.vocab_size, size=(8, length // 3)))
    labels = torch.cat([torch.full_like(once, -100), once], dim=1)
    repeats = model(input_ids=torch.cat([once, once], dim=1), labels=labels).loss
    return float(model(input_ids=stories, labels=stories).loss), float(repeats)


def checkpoint_steps(steps: int) -> list[int]:
    """After how many steps a checkpoint is saved: often in the first quarter, where the heads form, then four times
    more rarely; the untrained model and the last one are among them."""
    fine = max(1, steps // 88)
    quarter = range(0, steps // 4 + 1, fine)
    return sorted({*quarter, *range(0, steps + 1, 4 * fine), steps})


def train(
    settings: Settings, log: Log = print, keep: Callable[[int, Any, Any], None] = lambda step, model, tokenizer: None
) -> tuple[Any, Any, list[float]]:
    """The trained model, its tokenizer and the training loss of every step; ``keep`` sees every checkpoint."""
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer()
    batches = Batches(settings, tokenizer)
    model = build_model(settings, tokenizer.get_vocab_size())
    optimiser = optimiser_for(model, settings)
    log(f"vocabulary {tokenizer.get_vocab_size()}, training text {len(batches.corpus)} tokens, {asdict(settings)}")
    losses: list[float] = []
    started = time.perf_counter()
    kept = set(checkpoint_steps(settings.steps))
    for step in range(settings.steps):
        if step in kept:
            keep(step, model, tokenizer)
        for group in optimiser.param_groups:
            group["lr"] = group["rate"] * learning_rate(step, settings)
        loss = model(**batches.next(step)).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        if step % 50 == 49 or step + 1 == settings.steps:
            log(progress_line(model, batches, step, losses, time.perf_counter() - started))
    keep(settings.steps, model, tokenizer)
    return model.eval(), tokenizer, losses


def progress_line(model: Any, batches: Batches, step: int, losses: list[float], seconds: float) -> str:
    scores = behaviour(model, sequences=8, length=batches.settings.length // 3, special_ids=range(len(SPECIAL)))
    best = {kind: " ".join(f"{head}={value:.2f}" for head, value in scores.top(kind, 3)) for kind in scores}
    stories, repeats = held_out_losses(model, batches)
    return (
        f"step {step + 1:5d}  loss {np.mean(losses[-50:]):.3f}  stories {stories:.3f}  repeats {repeats:.3f}  "
        f"{seconds:6.0f} s  previous {best['previous_token']}  induction {best['induction']}"
    )


def save(model: Any, tokenizer: Any, settings: Settings, out: Path, log_lines: list[str]) -> BehaviourScores:
    """Write the model directory: weights, tokenizer, head scores measured on the saved files, and the model card."""
    save_model(model, tokenizer, settings, out)
    scores = behaviour(out, length=min(100, settings.length // 2))
    (out / "behaviour.json").write_text(json.dumps(rounded(scores), indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(settings, scores, model, log_lines), encoding="utf-8")
    return scores


def save_model(model: Any, tokenizer: Any, settings: Settings, out: Path) -> None:
    """Weights, config and tokenizer in Hugging Face layout."""
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], bos_token=SPECIAL[0], unk_token=SPECIAL[1],
        model_max_length=settings.length, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.save_pretrained(out)


def rounded(scores: BehaviourScores) -> dict[str, dict[str, float]]:
    """Head scores with the digits that do not depend on the machine."""
    return {kind: {head: round(value, 5) for head, value in scores[kind].items()} for kind in scores}


def model_card(settings: Settings, scores: BehaviourScores, model: Any, log_lines: list[str]) -> str:
    """What the model is, how it was trained and what its heads do."""
    rows = ["| head | identity | previous token | duplicate token | induction |", "|---|---|---|---|---|"]
    for head in map(str, scores.heads):
        rows.append(f"| {head} | " + " | ".join(f"{scores[kind][head]:.3f}" for kind in scores) + " |")
    facts = {
        "layers": settings.n_layers,
        "heads per layer": settings.n_heads,
        "d_model": settings.d_model,
        "d_head": settings.d_model // settings.n_heads,
        "context": f"{settings.length} tokens, learned positions",
        "vocabulary": f"{model.config.vocab_size} tokens: whole words, letters, punctuation",
        "trained for": f"{settings.steps} steps of {settings.tokens_per_step} tokens, seed {settings.seed}",
        "start": f"{settings.primed_heads} heads of the first layer favour the previous token; sinusoidal positions",
        "optimiser": f"AdamW, learning rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}",
    }
    return CARD.format(
        facts="\n".join(f"- {name}: {value}" for name, value in facts.items()),
        table="\n".join(rows),
        protocol=", ".join(f"{name} {value}" for name, value in scores.protocol.items()),
        last=log_lines[-1].split("  previous")[0] if log_lines else "",
    )


CARD = """---
license: mit
library_name: transformers
tags: [attention-only, interpretability, synthetic]
---

# headspan demo: two attention-only layers

A small language model for demonstrations. `examples/train_demo.py` of the package headspan trained it on synthetic
text that the same script generates; no other text was used. It has previous-token heads in its first layer and
induction heads in its second. It is not useful for generating text.

{facts}

It opens as an ordinary `gpt2` model. The MLPs have width one and weights that are zero and were never trained, so the
model is exactly attention-only: pre-LayerNorm, final LayerNorm, unembedding tied to the embedding.

Training data: stories from a seeded grammar over about 1,300 words (people, trades, animals, food, tools, places …),
lists recited twice, and facts about countries. Some sequences quote a passage again; others are random words repeated
over and over. End of training: {last}.

## Head scores

Mean attention on random sequences repeated twice ({protocol}; `headspan behaviour`).

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model of headspan.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, help="directory for the models on the way, step0, step25, …")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = Settings(seed=arguments.seed, steps=arguments.steps)
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    def keep(step: int, model: Any, tokenizer: Any) -> None:
        if arguments.checkpoints is not None:
            save_model(model, tokenizer, settings, arguments.checkpoints / f"step{step}")

    model, tokenizer, _ = train(settings, log, keep)
    scores = save(model, tokenizer, settings, arguments.out, lines)
    for kind in scores:
        log(f"{kind:16s}" + " ".join(f"{head}={value:.3f}" for head, value in scores.top(kind, 5)))


if __name__ == "__main__":
    main()
