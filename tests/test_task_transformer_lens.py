"""Edges of a task against TransformerLens: attributions of all edges, circuits, and exact values between heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import headspan as hs
from conftest import unavailable
from families import FAMILIES, build
from headspan.running.opening import running

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headspan.running.tasks.attribution import attribute  # noqa: E402
from headspan.running.tasks.graph_model import GraphModel  # noqa: E402
from headspan.running.tasks.objectives import Batch, objective  # noqa: E402
from headspan.running.tasks.pairs import Prompt  # noqa: E402
from headspan.running.tasks.patching import circuit_values, exact_values  # noqa: E402
from headspan.running.tasks.prompts import task_prompts  # noqa: E402

DEMO = Path(hs.__file__).parent / "data" / "demo"
GOAL = "logit-difference"
PAIR = Prompt((5, 10, 15, 20, 25, 10), (5, 10, 33, 20, 25, 10), (7,), (9,))
KINDS = {"embed": "W", "attn_head_out": "O", "mlp_out": "W", "mlp_in": "R", "logits": "R"}


class Both(NamedTuple):
    """The same model here and in TransformerLens."""

    graph: GraphModel
    bridge: Any


def both(folder: Path) -> Iterator[Both]:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        unavailable("TransformerLens is not installed")
    bridge = TransformerBridge.boot_transformers(str(folder)).eval()
    with running(folder, logits=True) as ready:
        yield Both(GraphModel(ready), bridge)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Two layers of heads and MLPs with random weights."""
    folder = tmp_path_factory.mktemp("small")
    build(FAMILIES["gpt2"]).save_pretrained(folder)
    yield from both(folder)


@pytest.fixture(scope="module")
def demo() -> Iterator[Both]:
    yield from both(DEMO)


def value(logits: Any, prompt: Prompt) -> Any:
    """Of TransformerLens's logits, (1, T, vocabulary)."""
    return logits[0, -1, prompt.answers[0]] - logits[0, -1, prompt.wrong[0]]


def port(node: Any) -> str:
    """Our name of a node of TransformerLens."""
    if node.kind in ("embed", "logits"):
        return {"embed": "embedding.W", "logits": "logits.R"}[node.kind]
    name = f"L{node.layer}MLP" if node.head is None else f"L{node.layer}H{node.head}"
    return f"{name}.{KINDS[node.kind] if node.kind in KINDS else node.kind[0].upper()}"


def test_attributions_of_all_edges(small: Both) -> None:
    from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

    batch = Batch.of([PAIR])
    found = attribute(small.graph, batch, GOAL, "eap", 10**9).values[0]
    # its gradient is that of the run it calls corrupt, towards the other one: the names are swapped
    edge = EdgeAttributionConfig(granularity="edge")
    scores = attribution_patch(small.bridge, batch.corrupted, batch.clean, lambda logits: value(logits, PAIR), edge)
    theirs = np.zeros_like(found)
    for (writer, reader), score in scores.edge_scores.items():  # one edge per token
        theirs[small.graph.table.place(port(writer), port(reader))] += score
    assert len(scores.edge_scores) == small.graph.table.n_edges * len(PAIR.clean)
    np.testing.assert_allclose(found, theirs, rtol=1e-3, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("count", [10, 30, 60])
def test_circuits(small: Both, count: int) -> None:
    from transformer_lens.tools.analysis.attribution_patching import Node, faithfulness

    graph, batch = small.graph, Batch.of([PAIR])
    kept = graph.table.circuit(attribute(graph, batch, GOAL, "ig", 10**9).values[0], count)
    with torch.no_grad():
        runs = graph.run(batch.clean), graph.run(batch.corrupted)
    values = circuit_values(graph, batch, GOAL, kept, *runs)
    kinds = {"O": "attn_head_out", "Q": "q_input", "K": "k_input", "V": "v_input"}

    def node(given: Any, token: int) -> Any:
        head = given.head
        if head.kind in ("embedding", "logits"):
            return Node("embed", token) if head.kind == "embedding" else Node("logits", token, len(graph.blocks) - 1)
        if head.kind == "mlp":
            return Node("mlp_out" if str(given.role) == "W" else "mlp_in", token, head.layer)
        return Node(kinds[str(given.role)], token, head.layer, head.index)

    circuit = [
        (node(graph.table.writers[row], token), node(graph.table.readers[column], token))
        for row, column in np.argwhere(kept)
        for token in range(len(PAIR.clean))
    ]
    theirs = faithfulness(small.bridge, batch.clean, batch.corrupted, lambda logits: value(logits, PAIR), circuit)
    whole, nothing = (objective(GOAL, batch, run.logits, run.logits).item() for run in runs)
    assert (values[0] - nothing) / (whole - nothing) == pytest.approx(theirs.recovered, abs=1e-4)
    assert abs(theirs.recovered - 1) > 0.01  # the circuit is neither everything …
    assert abs(theirs.recovered) > 0.01  # … nor nothing


@pytest.mark.parametrize("role", ["Q", "K", "V"])
def test_exact_values_between_heads(demo: Both, role: str) -> None:
    from transformer_lens.patching import get_act_patch_direct_path

    graph, bridge = demo
    prompt = task_prompts(graph.model, "induction", count=4).prompts[0]
    batch = Batch.of([prompt])
    with torch.no_grad():
        runs = graph.run(batch.clean), graph.run(batch.corrupted)
        caches = [bridge.run_with_cache(ids)[1] for ids in (batch.corrupted, batch.clean)]
        before = value(bridge(batch.clean), prompt)
        for source in (0, 3, 7):
            theirs = get_act_patch_direct_path(
                bridge, batch.clean, *caches, lambda logits: value(logits, prompt) - before,
                src_layer=0, src_head=source, component=role.lower(), verbose=False,
            )[1]  # fmt: skip
            places = [graph.table.place(f"L0H{source}.O", f"L1H{head}.{role}") for head in range(len(theirs))]
            ours = [exact_values(graph, batch, GOAL, *place, *runs)[0] for place in places]
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
