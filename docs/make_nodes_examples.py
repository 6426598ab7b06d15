"""Compute the numbers in docs/nodes.md: ``python docs/make_nodes_examples.py SmolLM2-135M-Instruct.Q4_1.gguf``.

1. Heads that write the unembedding of some words more than that of random capitalised words: found on half of the
   words, tested on the other half.
2. A difference of means from running the demo model: the stream after one token minus the stream after another. For
   each head: the share its weights can write, the part it wrote, and the mean effect of its OK edges.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

import headspan as hs
from headspan.node_kinds.tokens import token_id
from headspan.running.opening import running

WORDS = (
    "France", "Germany", "Italy", "Spain", "Japan", "China", "Russia", "India",
    "Canada", "Brazil", "Mexico", "Egypt", "Greece", "Turkey", "Poland", "Iran",
)  # fmt: skip
RANDOM_TOKENS, LISTS = 1000, 10_000


def head_shares(weights: Any, ids: list[int]) -> tuple[list[str], np.ndarray]:
    """The share of each token's unembedding row in O of each head: names of ports, (tokens, ports)."""
    names = [f"<id {i}>" for i in ids]
    report = hs.nodes(weights, tokens=names, k=len(weights.heads("O")))
    ports = [f"{head}.O" for head in weights.heads("O")]
    column, line = {port: i for i, port in enumerate(ports)}, {}
    shares = np.zeros((len(ids), len(ports)))
    for row in report.by_node():
        if row["side"] == "written by":
            shares[line.setdefault(row["node"], len(line)), column[row["partner"]]] = row["share"]
    return ports, shares


def words(model: str) -> dict[str, object]:
    """Heads found on the first half of the words, and their p on the second half."""
    weights = hs.fold(hs.open(model))
    rng = np.random.default_rng(0)
    chosen = [token_id(weights, f" {word}") for word in WORDS]
    readable = weights.vocabulary().readable
    capital = [i for i in range(weights.vocab_size or 0) if re.fullmatch("_[A-Z][a-z]{2,}", readable(i))]
    pool = np.setdiff1d(capital, chosen)
    ports, own = head_shares(weights, chosen)
    _, other = head_shares(weights, rng.choice(pool, RANDOM_TOKENS, replace=False).tolist())
    half = len(WORDS) // 2
    lists = np.array([other[rng.choice(len(other), half, replace=False)].mean(axis=0) for _ in range(LISTS)])
    p = [(1 + (lists >= part.mean(axis=0)).sum(axis=0)) / (1 + LISTS) for part in (own[:half], own[half:])]
    found = np.flatnonzero(p[0] <= 1 / len(ports))
    best = sorted(found, key=lambda i: (p[0][i], -own[:half, i].mean()))
    return {
        "heads": len(ports), "random words to draw from": len(pool),
        "chance": weights.d_head("O") / weights.d_model, "random words": float(other.mean()),
        "found": len(found), "again at 0.05": int((p[1][found] <= 0.05).sum()),
        "best": [(ports[i], float(own[:half, i].mean()), float(own[half:, i].mean()), float(other[:, i].mean()),
                  float(p[0][i]), float(p[1][i])) for i in best[:5]],
    }  # fmt: skip


PLACE, LENGTH, TEXTS = 20, 40, 400


def means() -> dict[str, Any]:
    """For each head: share of the direction (half of the texts), p, part of the difference (other half), effect."""
    import torch

    weights = hs.open("demo")
    rng = np.random.default_rng(0)
    with running("demo") as live:
        pool = [i for i in range(live.vocab_size) if i not in live.special_ids]
        texts = rng.choice(pool, (2, TEXTS // 2, LENGTH))
        previous = rng.choice(pool, 2, replace=False)
        texts[:, :, PLACE - 1] = previous[:, None]  # one token before the position that is read
        inner: list[torch.Tensor] = []
        hook = live.model.h[0].attn.c_proj.register_forward_pre_hook(lambda module, given: inner.append(given[0]))
        with torch.inference_mode():
            flat = torch.from_numpy(texts.reshape(TEXTS, LENGTH))
            stream = live.model(flat, output_hidden_states=True).hidden_states[1][:, PLACE].numpy()
        hook.remove()
    heads = inner[0][:, PLACE].numpy().reshape(TEXTS, weights.n_heads, -1)
    written = np.einsum("nhm,hdm->nhd", heads, weights.read("O", 0))

    def difference(values: np.ndarray, part: slice) -> np.ndarray:
        first, second = values.reshape(2, TEXTS // 2, *values.shape[1:])[:, part]
        return first.mean(axis=0) - second.mean(axis=0)

    half, rest = slice(0, TEXTS // 4), slice(TEXTS // 4, None)
    direction = difference(stream, half)
    report = hs.nodes(weights, hs.Node(direction, "previous", layer=1, writes=False), k=weights.n_heads)
    unit = direction / np.linalg.norm(direction)
    parts = difference(written, rest) @ unit / (difference(stream, rest) @ unit)
    effects = hs.effects("demo", pairing="OK", random=True, sequences=8).of("OK")  # (source, target)
    used = np.nanmean(effects[: weights.n_heads], axis=1)
    return {
        row["partner"]: (row["share"], row["p"], float(parts[i]), float(used[i]))
        for row in report.rows()
        for i in [hs.Port.parse(row["partner"]).head.index]
    }


if __name__ == "__main__":
    results = [words(sys.argv[1])] if len(sys.argv) > 1 else []
    for found in (*results, means()):
        print(*(f"{key}: {value}" for key, value in found.items()), "", sep="\n")
