"""What task circuits cost: attributions, exact edges and one circuit, in processor time and memory.

    python benchmarks/bench_task.py model PATH [--task induction] [--prompts 16]
    python benchmarks/bench_task.py shape [--layers 2] [--prompts 16] [--length 32]

``model``: prompts of a task run together; processor time, one run. ``shape``: memory of attributions of an 8B shape
(d 4096, 32 heads, 8 key/value heads, MLP 14336) with random weights and a few layers, and no room for what all writers
wrote. It is compared with a forward and backward pass alone, and with an array of what all writers wrote, tokens ×
writers × d_model. Linux only: the peaks are those of the kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headspan.running.opening import running
from headspan.running.tasks.attribution import attribute
from headspan.running.tasks.graph_model import GraphModel
from headspan.running.tasks.objectives import Batch, objective
from headspan.running.tasks.pairs import Prompt
from headspan.running.tasks.patching import circuit_values, exact_values
from headspan.running.tasks.prompts import task_prompts

GOAL = "logit-difference"
VERIFIED = 40
MEGABYTE = 1e6
LIBC = ctypes.CDLL("libc.so.6")
LIBC.mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: an array that is freed goes back at once, so peaks are those of live arrays


def memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def measured(what: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """Print the processor time and the peak memory above what was there before; returns the latter and the result."""
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, start = memory("VmRSS"), time.process_time()
    found = work()
    seconds, peak = time.process_time() - start, memory("VmHWM") - before
    print(f"{what:44} {seconds:8.2f} s {peak / MEGABYTE:8.0f} MB", flush=True)
    return peak, found


def forward_and_backward(graph: GraphModel, batch: Batch) -> None:
    """The model alone, with the gradient at its embeddings."""
    import torch

    model = graph.model.model
    start = model.get_input_embeddings()(batch.clean).detach().requires_grad_()
    logits = model(inputs_embeds=start, use_cache=False, logits_to_keep=1).logits[:, -1]
    torch.autograd.grad(objective(GOAL, batch, logits, logits).sum(), start)


def model(path: str, task: str, count: int) -> None:
    import torch

    with running(path, logits=True) as ready:
        graph = GraphModel(ready)
        by_length: dict[int, list[Prompt]] = {}
        for prompt in task_prompts(ready, task, count=20 * count).prompts:
            by_length.setdefault(len(prompt.clean), []).append(prompt)
        batch = Batch.of(max(by_length.values(), key=len)[:count])
        print(f"{len(batch.prompts)} prompts of {batch.clean.shape[1]} tokens, {graph.table.n_edges:,} edges")
        measured("forward and backward", lambda: forward_and_backward(graph, batch))
        _, found = measured("EAP", lambda: attribute(graph, batch, GOAL, "eap", 10**9))
        measured("EAP-IG, 5 steps", lambda: attribute(graph, batch, GOAL, "ig", 10**9))
        with torch.no_grad():
            _, runs = measured("clean and corrupted pass", lambda: (graph.run(batch.clean), graph.run(batch.corrupted)))
        total = found.values.sum(0)
        edges = [divmod(int(place), len(graph.table.readers)) for place in graph.table.strongest(total, VERIFIED)]
        measured(
            f"exact values of the {len(edges)} largest edges",
            lambda: [exact_values(graph, batch, GOAL, *edge, *runs) for edge in edges],
        )
        kept = graph.table.circuit(total, graph.table.n_edges // 10)
        measured("circuit of 10 % of edges", lambda: circuit_values(graph, batch, GOAL, kept, *runs))


def shape(layers: int, count: int, length: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def prompt() -> Prompt:
        clean = rng.integers(0, 512, length)
        other = np.where(np.arange(length) == length // 2, (clean + 1) % 512, clean)
        return Prompt(tuple(clean.tolist()), tuple(other.tolist()), (1,), (2,))

    batch = Batch.of([prompt() for _ in range(count)])
    with running(LlamaForCausalLM(config).eval(), logits=True) as ready:
        graph = GraphModel(ready)
        writers = len(graph.table.writers)
        print(f"{layers} layers, {count} prompts of {length} tokens, {writers} writers")
        forward_and_backward(graph, batch)  # the first pass allocates what stays
        bare, _ = measured("forward and backward", lambda: forward_and_backward(graph, batch))
        ours, _ = measured("EAP", lambda: attribute(graph, batch, GOAL, "eap", 0))
        array = batch.clean.numel() * writers * config.hidden_size * 4
        beyond = ours - bare
        print(f"{'EAP beyond the passes':44} {beyond / MEGABYTE:21.0f} MB")
        print(f"{'tokens × writers × d_model':44} {array / MEGABYTE:21.0f} MB, share {beyond / array:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("model")
    one.add_argument("path")
    one.add_argument("--task", default="induction")
    other = commands.add_parser("shape")
    other.add_argument("--layers", type=int, default=2)
    other.add_argument("--length", type=int, default=32)
    for command in (one, other):
        command.add_argument("--prompts", type=int, default=16)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.command == "model":
        model(given.path, given.task, given.prompts)
    else:
        shape(given.layers, given.prompts, given.length)


if __name__ == "__main__":
    main()
