"""Examples of edges: equal to hooked forward passes, and kept in results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import headspan as hs
import test_effects_families
from families import build
from headspan.results.effects import attach, effects_in, effects_of
from headspan.results.tasks.examples import PER_PAIRING, Examples
from headspan.running.opening import load
from headspan.running.tasks.prompts import task_prompts
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Role
from test_effects_families import CASES, TOKENS, Oracle

K = FLOW_PAIRINGS[1]
MODELS = {"demo": ("resample",), "llama": ("resample", "mean", "zero"), "qwen3": ("resample",), "gemma2": ("mean",)}


@pytest.fixture(scope="module")
def demo() -> hs.Effects:
    return hs.effects("demo", draws=0)


def of(effects: hs.Effects) -> Examples:
    assert effects.examples is not None
    return effects.examples


@pytest.mark.parametrize(("name", "ablate"), [(name, ablate) for name in MODELS for ablate in MODELS[name]])
def test_examples_equal_hooked_forward_passes(name: str, ablate: str, tmp_path: Path) -> None:
    """A real model, and random ones with shared keys and values, QK-norm, and norms after attention."""
    oracle = Oracle(load("demo").model if name == "demo" else build(CASES[name]), tmp_path, ablate)
    found = hs.effects(oracle.model, tokens=TOKENS, ablate=ablate, draws=0)
    examples, clean = of(found), oracle.clean[0]
    assert examples.about == "tokens" and len(examples.tokens) == len(TOKENS[0])
    assert {edge.pairing for edge in examples.edges} == set(FLOW_PAIRINGS)
    for pairing, source, target, head in examples.edges:
        edited = oracle.edited(0, (source.layer, source.index), target.layer, str(pairing.target))
        group = [one.index for one in found.ports.group_of(target)]
        if pairing.target is Role.V:
            change = np.linalg.norm(oracle.outputs(edited, target.layer, clean), axis=2)
            size = np.linalg.norm(oracle.outputs(clean, target.layer, None), axis=2)
            np.testing.assert_allclose(
                examples.changes(source, target), (change / size)[:, head.index], rtol=1e-3, atol=1e-5
            )
            changes = np.linalg.norm(change, axis=0) / np.linalg.norm(size, axis=0)
        else:
            own, other = (run["attention"][target.layer] for run in (clean, edited))
            for kept, whole in zip(examples.rows(pairing, source, target), (own, other), strict=True):
                np.testing.assert_allclose(kept, whole[head.index], atol=5e-4)  # half precision
            changes = np.abs(own - other).sum((1, 2))
        assert changes[head.index] >= changes[group].max() * 0.999, "the query head that changes most is shown"


def test_examples_of_a_task_exchange_what_the_corrupted_prompt_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = task_prompts(load("demo"), "induction", count=4).prompts[0]
    found = hs.task("demo", "induction", prompts=4, k=3, verify=False)
    examples = found.examples
    assert examples is not None and examples.about == "induction" and len(examples.tokens) == len(prompt.clean)
    monkeypatch.setattr(test_effects_families, "TOKENS", [list(prompt.clean), list(prompt.corrupted)])
    oracle = Oracle(load("demo").model, tmp_path)
    table = found.table
    best = [divmod(int(p), len(table.readers)) for p in table.strongest(found.attribution, table.n_edges)]
    keys = [place for place in best if table.between_heads[place] and table.readers[place[1]].role is Role.K]
    names: list[Any] = [(table.writers[row].head, table.readers[column].head) for row, column in keys]
    assert [edge[1:3] for edge in examples.edges if edge.pairing == K] == names[:PER_PAIRING]
    for source, target in names[:3]:
        edited = oracle.edited(0, (source.layer, source.index), target.layer, "K")
        for kept, run in zip(examples.rows(K, source, target), (oracle.clean[0], edited), strict=True):
            np.testing.assert_allclose(kept, run["attention"][target.layer][target.index], atol=5e-4)
    found.save(tmp_path / "task.safetensors")
    loaded = hs.load(tmp_path / "task.safetensors")
    assert isinstance(loaded, hs.Task) and loaded.examples is not None
    same(loaded.examples, examples)


def test_the_best_edges_are_shown(demo: hs.Effects, tmp_path: Path) -> None:
    """Those with a large effect first, of these the ones that a page draws, then the largest."""
    examples = of(demo)
    for pairing in FLOW_PAIRINGS:
        shown = {edge[:3] for edge in examples.edges if edge.pairing == pairing}
        largest = demo.matrix(pairing).top(PER_PAIRING)
        assert shown == {(pairing, edge.source, edge.target) for edge in largest}
    path = tmp_path / "demo.safetensors"
    hs.score("demo", "pk", "OK", out=path)
    compared = hs.effects("demo", pairing="OK", draws=2, into=path)
    large = compared.large("OK")
    matrix = compared.matrix("OK")
    shown = of(compared).edges
    drawn = {(edge.source, edge.target) for edge in hs.load(path)["pk", "OK"].forward().top(PER_PAIRING)}  # type: ignore[index]
    assert int(large.sum()) > PER_PAIRING == len(shown)
    assert {edge[1:3] for edge in shown} == {pair for pair in drawn if large[matrix.find(*pair)]}


def test_the_sequence_is_part_of_what_was_measured(demo: hs.Effects) -> None:
    assert "".join(of(demo).tokens).startswith(" The ferry to Skarholm left at six, and Anna nearly missed it.")
    repeated = of(hs.effects("demo", pairing="OK", random=True, sequences=2, length=6, draws=0))
    assert repeated.about == "random" and repeated.tokens[:6] == repeated.tokens[6:]
    before, _ = repeated.rows(K, *repeated.edges[0][1:3])
    np.testing.assert_allclose(before.sum(1), 1, atol=2e-3)
    assert hs.effects("demo", pairing="OK", shared=2, random=True, sequences=2, length=6).examples is None


def test_examples_are_kept_with_effects_and_in_a_result(demo: hs.Effects, tmp_path: Path) -> None:
    demo.save(tmp_path / "effects.safetensors")
    scores = hs.score("demo", "pk", "flow")
    attach(scores, demo)
    scores.save(tmp_path / "scores.safetensors")
    loaded = hs.load(tmp_path / "scores.safetensors")
    assert isinstance(loaded, hs.Scores)
    for found in (hs.load(tmp_path / "effects.safetensors"), effects_in(scores), effects_of(loaded)):
        assert isinstance(found, hs.Effects)
        same(of(found), of(demo))
        assert "examples" not in found.protocol
    attach(loaded, replace(demo, examples=None))
    assert effects_of(loaded).examples is None and not [name for name in loaded.extra if name.startswith("example")]


def same(first: Examples, second: Examples) -> None:
    assert first.tokens == second.tokens and first.about == second.about and first.edges == second.edges
    for name in ("before", "after", "change"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def damaged(examples: Examples) -> dict[str, Examples]:
    edges = examples.edges
    beyond = examples.before.copy()
    beyond[0, 0] = 1.5
    return {
        "tokens": replace(examples, tokens=examples.tokens[:1]),
        "letters": replace(examples, tokens=["x" * 100, *examples.tokens[1:]]),
        "not of its edges": replace(examples, edges=[edges[0]._replace(head=Head(0, 0)), *edges[1:]]),
        "are not of its": replace(examples, edges=[edges[1], *edges[1:]]),
        "do not fit": replace(examples, after=examples.after[1:]),
        "outside 0 to 1": replace(examples, before=beyond),
        "no run can have": replace(examples, change=examples.change - 10),
    }


def test_damaged_examples_are_refused(demo: hs.Effects, tmp_path: Path) -> None:
    for i, (words, examples) in enumerate(damaged(of(demo)).items()):
        path = tmp_path / f"{i}.safetensors"
        replace(demo, examples=examples).save(path)
        with pytest.raises(HeadspanError, match=words):
            hs.load(path)
        scores: Any = hs.score("demo", "pk", "OK")
        attach(scores, replace(demo, examples=examples))
        with pytest.raises(HeadspanError, match=words):
            effects_in(scores)
