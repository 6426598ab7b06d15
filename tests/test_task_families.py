"""For every family that runs: attributions, exact values and circuits equal those of passes with explicit hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import test_effects_families
import test_effects_latent
from families import FAMILIES, LATENT, Family, build
from headspan.running.opening import running
from headspan.vocabulary.errors import HeadspanError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from headspan.running.tasks import attribution  # noqa: E402
from headspan.running.tasks.attribution import attribute  # noqa: E402
from headspan.running.tasks.graph_model import GraphModel  # noqa: E402
from headspan.running.tasks.objectives import Batch, objective  # noqa: E402
from headspan.running.tasks.patching import circuit_values, exact_values  # noqa: E402
from headspan.running.tasks.prompts import Prompt  # noqa: E402
from task_oracle import Oracle  # noqa: E402

PROMPTS = [
    Prompt((5, 10, 15, 20, 25), (5, 10, 33, 20, 25), (7,), (9,)),
    Prompt((7, 3, 44, 3, 12), (7, 3, 44, 8, 12), (7, 11), (30,)),
]
GOAL = "logit-difference"
TWO_ATTENTIONS = {"latent longcat_flash", "latent longcat_flash-two"}
EVERY = test_effects_families.CASES | {f"latent {name}": one for name, one in test_effects_latent.CASES.items()}
# An indexer that chooses keys, Mamba beside attention: they read the stream too.
OTHER_READERS = {"falcon_h1", "latent deepseek_v32-chosen", "latent glm_moe_dsa-chosen"}
CASES: dict[str, Family] = {n: family for n, family in EVERY.items() if n not in TWO_ATTENTIONS | OTHER_READERS}
SINGLE = {"xglm"}  # its mask overflows in float64
KINDS = ["gpt2", "llama", "gemma2", "phi", "olmo2", "jamba", "afmoe", "latent deepseek_v3"]


@contextmanager
def graph_of(name: str) -> Iterator[GraphModel]:
    model = build(EVERY[name])
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    with running(model if name in SINGLE else model.double(), dtype="stored", logits=True) as ready:
        yield GraphModel(ready)


def oracle_attributions(graph: GraphModel, batch: Batch, shares: list[float]) -> Any:
    """(B, writers, readers)."""
    oracle = Oracle(graph)
    with torch.no_grad():
        clean, corrupted = oracle.forward(batch.clean)[1], oracle.forward(batch.corrupted)[1]
    start, other = clean["embedding.W"], corrupted["embedding.W"]
    total = np.zeros((len(batch.prompts), *graph.table.mask.shape))
    for share in shares:
        leaves = oracle.leaves(start.shape, start.dtype)
        logits, _ = oracle.forward(batch.clean, leaves, other + share * (start - other))
        value = objective(GOAL, batch, logits, logits).sum()
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        for (group, columns), gradient in zip(graph.groups.items(), found, strict=True):
            for row in range(int(graph.table.before[columns.start])):
                port = str(graph.table.writers[row])
                if gradient is not None:
                    change = corrupted[port] - clean[port]
                    total[:, row, columns] += torch.einsum("btd,hbtd->bh", change, gradient).numpy() / len(shares)
            assert group is not None
    return total


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_edge_equals_autograd_with_an_input_per_edge(name: str) -> None:
    with graph_of(name) as graph:
        batch = Batch.of(PROMPTS)
        graph.check(batch.clean, batch.corrupted)
        ours = attribute(graph, batch, GOAL, "eap", 10**9)
        theirs = oracle_attributions(graph, batch, [1.0])
        close = 2e-3 if name in SINGLE else 1e-5
        np.testing.assert_allclose(ours.values, theirs, rtol=close, atol=close * np.abs(theirs).max())
        assert (ours.values[:, ~graph.table.mask] == 0).all()
        with torch.no_grad():
            runs = graph.run(batch.clean), graph.run(batch.corrupted)
        whole = circuit_values(graph, batch, GOAL, graph.table.mask, *runs)
        nothing = circuit_values(graph, batch, GOAL, np.zeros_like(graph.table.mask), *runs)
        clean, corrupted = (objective(GOAL, batch, run.logits, run.logits).numpy() for run in runs)
        np.testing.assert_array_equal(whole, clean)
        np.testing.assert_allclose(nothing, corrupted, atol=0 if "latent" not in name else 1e-9)
        some_exact_values(graph, batch, runs, 1e-4 if name in SINGLE else 1e-5)


def some_exact_values(graph: GraphModel, batch: Batch, runs: Any, close: float) -> None:
    """One edge into each kind of reader, from a head if there is one before it."""
    oracle = Oracle(graph)
    with torch.no_grad():
        (logits, clean), (_, corrupted) = oracle.forward(batch.clean), oracle.forward(batch.corrupted)
        before = objective(GOAL, batch, logits, logits).numpy()
        kinds = {str(port.role) + str(port.head.kind): i for i, port in enumerate(graph.table.readers)}
        for column in kinds.values():
            row = int(graph.table.before[column]) - 2
            groups = [g for g, columns in graph.groups.items() if columns.start <= column < columns.stop]
            leaves = {g: leaf.detach() for g, leaf in oracle.leaves(clean["embedding.W"].shape, logits.dtype).items()}
            port = str(graph.table.writers[row])
            for group in groups:  # two for Q with a gate
                leaves[group][column - graph.groups[group].start] = corrupted[port] - clean[port]
            changed, _ = oracle.forward(batch.clean, leaves)
            theirs = objective(GOAL, batch, changed, changed).numpy() - before
            ours = exact_values(graph, batch, GOAL, row, column, *runs)
            np.testing.assert_allclose(ours, theirs, rtol=close, atol=close * max(1.0, np.abs(before).max()))


@pytest.mark.parametrize("name", KINDS)
def test_integrated_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with graph_of(name) as graph:
        batch = Batch.of(PROMPTS)
        ours = attribute(graph, batch, GOAL, "ig", 10**9).values
        theirs = oracle_attributions(graph, batch, [0.0, 0.2, 0.4, 0.6, 0.8])
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
        monkeypatch.setattr(attribution, "_AT_ONCE", 1)  # one token at a time …
        in_parts = attribute(graph, batch, GOAL, "ig", 1).values  # … and too little memory for all writers at once
        np.testing.assert_allclose(in_parts, ours, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_a_circuit_of_all_edges_but_one_is_that_edge_corrupted(name: str) -> None:
    """If only one edge is corrupted, later nodes run on: the change is that of the exact value."""
    with graph_of(name) as graph:
        batch = Batch.of(PROMPTS)
        runs = graph.run(batch.clean), graph.run(batch.corrupted)
        clean = objective(GOAL, batch, runs[0].logits, runs[0].logits).detach().numpy()
        for column in (0, len(graph.table.readers) // 2, len(graph.table.readers) - 1):
            row = int(graph.table.before[column]) - 1
            kept = graph.table.mask.copy()
            kept[row, column] = False
            port = str(graph.table.writers[row])
            assert port != "embedding.W" or column == 0
            ours = circuit_values(graph, batch, GOAL, kept, *runs) - clean
            # the corrupted output of the writer is the same in both, as nothing before it is changed
            np.testing.assert_allclose(ours, exact_values(graph, batch, GOAL, row, column, *runs), atol=1e-9)


@pytest.mark.parametrize("name", sorted(TWO_ATTENTIONS))
def test_blocks_with_two_attentions_are_refused(name: str) -> None:
    with pytest.raises(HeadspanError, match="two attention layers"), graph_of(name):
        pass


@pytest.mark.parametrize("name", sorted(OTHER_READERS))
def test_other_readers_of_the_stream_are_noticed(name: str) -> None:
    batch = Batch.of(PROMPTS)
    with graph_of(name) as graph, pytest.raises(HeadspanError, match=r"no task circuits for .* reads the stream"):
        graph.check(batch.clean, batch.corrupted)


@pytest.mark.parametrize("name", ["bert", "gemma3n", "openai-gpt"])
def test_families_without_direct_edges_are_refused_by_name(name: str) -> None:
    family = FAMILIES[name] if name in FAMILIES else LATENT[name]
    said = f"no task circuits for .*{family.model_type.split('_')[0]}"
    with pytest.raises(HeadspanError, match=said), running(build(family), logits=True) as ready:
        GraphModel(ready)
