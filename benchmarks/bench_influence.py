"""What influence costs: observing beside a forward pass, influence beside pk, and both beside measured effects.

    python benchmarks/bench_influence.py shape [--layers 2] [--tokens 512] [--no-scores]
    python benchmarks/bench_influence.py model PATH

``shape``: random weights of a 7B shape (d 4096, 32 heads of 128, MLP 11008), the same in every layer, so that 32 layers
fit any machine; the time is that of different ones. ``model``: observe and influence of all edges against `effects` of
the same edges on the same number of tokens. Processor time and, on Linux, peak memory; one run.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import headspan as hs


def timed(what: str, work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = work()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # of the process until now
    print(f"{what:42} {seconds:8.1f} s {peak:6.1f} GB", flush=True)
    return seconds, found


def shape(layers: int, tokens: int, scores: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=4096, intermediate_size=11008, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaModel(config).eval()
    shared = {id(one): one for one in (model.config, *model.layers[0].parameters())}
    for number in range(1, layers):
        layer = copy.deepcopy(model.layers[0], dict(shared))
        layer.self_attn.layer_idx = number
        model.layers.append(layer)
    model.config.num_hidden_layers = layers
    ids = [np.random.default_rng(i).integers(0, 512, 128).tolist() for i in range(tokens // 128)]

    def forward() -> None:
        with torch.inference_mode():
            for row in ids:
                model(input_ids=torch.tensor([row]))

    model(input_ids=torch.tensor(ids[:1]))  # the first pass allocates what stays
    once, _ = timed(f"forward, {layers} layers, {tokens} tokens", forward)
    observed, stats = timed("observe", lambda: hs.observe(model, tokens=ids))
    print(f"observe / forward {observed / once:.2f}")
    if scores:
        pk, _ = timed("score pk, OQ OK OV", lambda: hs.score(model, "pk", "flow"))
        influence, _ = timed("score influence", lambda: hs.score(model, "influence", "flow", stats=stats))
        print(f"influence / pk {influence / pk:.2f}")


def model(path: str) -> None:
    observed, stats = timed("observe", lambda: hs.observe(path))
    scored, _ = timed("score influence", lambda: hs.score(path, "influence", "flow", stats=stats))
    measured, found = timed("effects, sizes only", lambda: hs.effects(path, draws=0))
    full, _ = timed("effects, with random outputs", lambda: hs.effects(path))
    tokens = sum(found.tokens.values())
    for name, seconds in (("sizes only", measured), ("with random outputs", full)):
        per_token = (seconds / tokens) / ((observed + scored) / stats.tokens)
        print(f"effects ({name}) / influence: {seconds / (observed + scored):.1f}, per token {per_token:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("shape")
    one.add_argument("--layers", type=int, default=2)
    one.add_argument("--tokens", type=int, default=512)
    one.add_argument("--scores", action=argparse.BooleanOptionalAction, default=True)
    commands.add_parser("model").add_argument("path")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    shape(given.layers, given.tokens, given.scores) if given.command == "shape" else model(given.path)


if __name__ == "__main__":
    main()
