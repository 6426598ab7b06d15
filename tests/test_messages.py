"""The catalogue of messages: the only tests that compare an error word by word.

Every other test checks the kind of an error and its key facts (the name, the number, the option), so that a reworded
message changes this file alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.results.labels import Labels


def arrays(d: int = 8, heads: int = 2, m: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {role: rng.normal(size=(2, heads, d, m)) for role in "QKVO"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a result and an adapter without weights."""
    place = tmp_path_factory.mktemp("messages")
    hs.score("demo", "pk", "OK").save(place / "r.safetensors")
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    return place


MOST_WORDS = 9  # of a pattern that other tests look for in an error
MESSAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no such head": (
        lambda place: hs.paths("demo", to="L9H0"),
        "there is no head L9H0: the heads go from L0H0 to L1H7",
    ),
    "not a head": (
        lambda place: hs.paths("demo", to="nonsense"),
        "'nonsense' names no end of edges. Give a head (L5H1), a port (L5H1.K), a layer (L5) or a class of heads, "
        "with `labels`",
    ),
    "end of a path": (
        lambda place: hs.paths("demo", to="L1H0.O"),
        "a path ends with an input. Give L1H0, or L1H0.K instead of L1H0.O",
    ),
    "beginning of a path": (
        lambda place: hs.paths("demo", from_="L1H0.K"),
        "a path begins with an output. Give L1H0.O instead of L1H0.K",
    ),
    "depth": (
        lambda place: hs.paths("demo", depth=5),
        "depth must be from 1 to 4, not 5",
    ),
    "last hop": (
        lambda place: hs.paths("demo", pairing="QK"),
        "a hop goes from what writes to what reads, and QK does not. Give OQ, OK or OV, or OR, WQ, WK, "
        "WV or WR of nodes",
    ),
    "unknown pairing": (
        lambda place: hs.score("demo", "pk", "OX"),
        "unknown pairing 'OX': give two of Q, K, V, O, source first, for example OK",
    ),
    "nothing to score": (
        lambda place: hs.score("demo", "pk", "OK", "same-type"),
        "nothing to score. Choose at least one similarity and one pairing that has pairs",
    ),
    "amount of memory": (
        lambda place: hs.score("demo", "pk", memory="lots"),
        "'lots' is not an amount of memory: write for example 2GB or 512MB",
    ),
    "what a result lacks": (
        lambda place: hs.top(place / "r.safetensors", "OQ"),
        "this result has no pk scores for OQ: it has pk for OK; choose one of these (`metric`, "
        "`pairing`), or score the model again with what you need",
    ),
    "rule of a wiring": (
        lambda place: hs.wiring(place / "r.safetensors", rule="best"),
        "rule must be one of top, top-per-target, significance, threshold, not 'best'",
    ),
    "threshold": (
        lambda place: hs.wiring(place / "r.safetensors", rule="threshold"),
        "the rule threshold needs a smallest score. Give `minimum`, for example 20",
    ),
    "no nodes": (
        lambda place: hs.nodes(arrays()),
        "no nodes were given. Name some with `nodes`, `sae`, `adapter`, `neurons`, `tokens`, `components`, `embedding` "
        "or `unembedding`",
    ),
    "nodes k": (
        lambda place: hs.nodes(arrays(), hs.Node(np.ones(8), "u", 1), k=0),
        "k must be at least 1, not 0",
    ),
    "layer of a node": (
        lambda place: hs.nodes(arrays(), hs.Node(np.ones(8), "u", 9)),
        "a node cannot be at layer 9: arrays has the layers 0 to 1, and 2 means after the last",
    ),
    "a node of another width": (
        lambda place: hs.nodes(arrays(), hs.Node(np.ones(9), "u", 1)),
        "the basis of u of shape (9,) has no axis of d_model 8: its vectors are not directions of this residual stream",
    ),
    "a node without a port": (
        lambda place: hs.Node(np.ones(8), "u", 1, reads=False, writes=False),
        "u neither reads nor writes: set reads or writes to True",
    ),
    "diff k": (
        lambda place: hs.diff("demo", "demo", k=0),
        "k is 0. Give 1 or more",
    ),
    "other shape": (
        lambda place: hs.diff(arrays(), arrays(d=10)),
        "arrays has d_model 8, arrays has 10. Heads can only be compared between models of the same "
        "width and the same numbers of heads",
    ),
    "weight of a diff": (
        lambda place: hs.diff("demo", "demo").of("L9H9.Q"),
        "there is no weight 'L9H9.Q' in this comparison. Write for example L0H0.Q",
    ),
    "table of a diff": (
        lambda place: hs.diff("demo", "demo").records("x"),
        "unknown table 'x'. Choose drift, edge, hub or all",
    ),
    "diff of a result": (
        lambda place: hs.diff("demo", place / "r.safetensors"),
        "{folder}/r.safetensors is a result file, and drift needs weights. Give the models, or compare "
        "two results with `hs.compare(first, second)`",
    ),
    "adapter first": (
        lambda place: hs.diff(place / "adapter", "demo"),
        "{folder}/adapter is an adapter. Give its base model first, then the adapter",
    ),
    "adapter that runs": (
        lambda place: hs.diff("demo", place / "adapter", effects=True),
        "{folder}/adapter is an adapter, which cannot run by itself. Merge it and give the merged model",
    ),
    "adapter without weights": (
        lambda place: hs.diff("demo", place / "adapter"),
        "{folder}/adapter has adapter_config.json but neither adapter_model.safetensors nor "
        "adapter_model.bin: it is incomplete",
    ),
    "unknown labels": (
        lambda place: Labels.load("gpt3-ioi"),
        "there are no labels 'gpt3-ioi': give one of gpt2-ioi, gpt2-identity, gpt2, a CSV file with "
        "the columns head,label or the result of a task",
    ),
    "no such file": (
        lambda place: hs.open(place / "nowhere"),
        "{folder}/nowhere: no such file or directory, and not the id of a model on the hub",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_the_message_is(case: str, folder: Path) -> None:
    call, message = MESSAGES[case]
    with pytest.raises(hs.HeadspanError) as caught:
        call(folder)
    assert str(caught.value) == message.format(folder=folder)


def test_other_tests_check_facts_and_not_sentences() -> None:
    long = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.keyword) or node.arg != "match" or not isinstance(node.value, ast.Constant):
                continue
            if len(str(node.value.value).split()) > MOST_WORDS:
                long.append(f"{path.name}:{node.value.lineno}: {node.value.value}")
    assert long == []
