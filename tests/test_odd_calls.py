"""Odd values in every argument of every public function and method: a message, never an internal error."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headspan as hs
from headspan.explorer.demo_measurements import with_shipped
from headspan.paper.evaluation import classification, detection
from headspan.results.effects import effects_of
from headspan.results.tasks.circuit import CircuitEdge


def generator() -> Iterator[object]:
    yield object()


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "3": lambda: 3,
    "-1": lambda: -1,
    "infinity": lambda: 1e400,
    "nan": lambda: float("nan"),
    "half": lambda: 0.5,
    "bytes": lambda: b"x",
    "empty text": lambda: "",
    "text": lambda: "nonsense",
    "text with NUL": lambda: "a\0b",
    "line break": lambda: "a\nb\x1b[31m",
    "surrogate": lambda: "\ud800",
    "empty list": list,
    "list of None": lambda: [None],
    "nested list": lambda: [["OK"]],
    "empty mapping": dict,
    "mapping": lambda: {"Q": 1},
    "object": object,
    "class": lambda: hs.Scores,
    "array": lambda: np.array([1.0, 2.0]),
    "matrix of objects": lambda: np.array([[object()]]),
    "empty array": lambda: np.zeros((0, 3)),
    "huge number": lambda: 10**400,
    "large number": lambda: 2**62,
    "generator": generator,
    "head": lambda: hs.Head(0, 0),
    "True": lambda: True,
    "function": lambda: print,
    "complex": lambda: 1j,
    "set": lambda: {1},
    "folder": lambda: Path("/"),
}


# Not odd: a name for a file, and functions that are called and fail by themselves.
GOOD = {("out", "text"), ("progress", "class"), ("say", "class")}


@pytest.fixture(scope="module", name="things")
def _things() -> dict[str, Any]:
    return small_things()


def small_things() -> dict[str, Any]:
    """Small good values by the name of the argument that takes them."""
    rng = np.random.default_rng(0)
    weights = hs.open(
        {role: rng.normal(size=(2, 2, 8, 2)) for role in "QKVO"} | {"unembedding": rng.normal(size=(9, 8))}
    )
    other = hs.open({role: rng.normal(size=(2, 2, 8, 2)) for role in "QKVO"})
    scores = hs.score(weights)
    labels = hs.Labels.from_pairs([("L0H0", "a"), ("L0H1", "a"), ("L1H0", "b"), ("L1H1", "b")])
    return {
        "weights": weights, "scores": scores, "labels": labels, "first": scores, "second": scores,
        "model": weights, "head": "L1H0", "pairing": "OK", "source": "L0H0.O", "target": "L1H0.K",
        "text": "OK", "classes": {"L0H0": "a"},
        "matrix": np.eye(3), "name": "gpt2-ioi", "pairs": [("L0H0", "a")], "role": "O", "label": "a", "value": "Q",
        "path": "nowhere.safetensors", "adapter": "nowhere", "references": ["nowhere"],
        "port": "L0H0.O", "layer": 0, "start": 0, "stop": 1, "key": ("pk", "OK"),
        "folder": "gallery", "other": other, "out": "figures", "effects": shipped_effects(),
        "task": "induction", "graph": "nowhere.json", "transcoders": "{}.npz",
        "circuit": hs.Circuit("c", "m", (CircuitEdge("L0H0.O", "L1H0.K"),)),
    }  # fmt: skip


def shipped_effects() -> hs.Effects:
    return effects_of(with_shipped(hs.score("demo", "pk", "flow")))


def functions() -> dict[str, Callable[..., Any]]:
    """Public functions, and constructors by name, that can be called on tiny things."""
    found = {name: getattr(hs, name) for name in hs.__all__ if inspect.isfunction(getattr(hs, name))}
    parsers = {f"{cls.__name__}.parse": cls.parse for cls in (hs.Head, hs.Pairing, hs.Port)}
    makers = {"Labels.load": hs.Labels.load, "Labels.from_pairs": hs.Labels.from_pairs, "Scores.load": hs.Scores.load}
    found["figures"] = partial(hs.figures, only="scatter")  # one of them is enough
    return found | parsers | makers | {"detection": detection, "classification": classification, "Role": role}


def role(value: Any) -> Any:
    return hs.Role.parse(value)


def methods(things: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    scores, labels, weights = things["scores"], things["labels"], things["weights"]
    hub = hs.hubs(scores, "OK")
    owners = {
        "scores": scores, "matrix": scores["pk", "OK"], "labels": labels, "hubs": hub, "inlet": hub.inlet,
        "wiring": hs.wiring(scores, k=2), "significance": hs.significance(scores, "OK"), "weights": weights,
        "around": scores.around("L1H0"), "edges": scores.top("OK", 2), "ports": weights.ports,
    }  # fmt: skip
    found: dict[str, Callable[..., Any]] = {}
    for owner, thing in owners.items():
        for name, method in inspect.getmembers(thing, inspect.ismethod):
            own = not name.startswith("_") and name not in list.__dict__ and name not in dict.__dict__
            own = own and not (owner == "ports" and inspect.isclass(method.__self__))  # how readers of models make it
            if own and len(inspect.signature(method).parameters):
                found[f"{owner}.{name}"] = method
        if hasattr(type(thing), "__getitem__") and not isinstance(thing, (list, dict)):
            found[f"{owner}[]"] = partial(_at, thing)
    return found


def _at(thing: Any, key: Any) -> Any:
    return thing[key]


def faults(name: str, call: Callable[..., Any], things: dict[str, Any]) -> list[str]:
    """What went wrong with odd values, one argument after the other."""
    parameters = inspect.signature(call).parameters
    good = {p.name: things[p.name] for p in parameters.values() if p.default is p.empty and p.name in things}
    found = []
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for odd, make in ODD.items():
            if (parameter.name, odd) in GOOD:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**(good | {parameter.name: make()}))
            except hs.HeadspanError as error:
                if not str(error) or "\n" in str(error):
                    found.append(f"{name}({parameter.name}={odd}): no sentence: {error!r}")
            except BaseException as error:
                found.append(f"{name}({parameter.name}={odd}): {type(error).__name__}: {str(error)[:100]}")
    return found


@pytest.mark.parametrize("name", sorted(functions()))
def test_functions(name: str, things: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = faults(name, functions()[name], things)
    assert not found, "\n".join(found)


def test_methods(things: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [fault for name, call in methods(things).items() for fault in faults(name, call, things)]
    assert not found, "\n".join(found)


def test_the_message_says_what_is_expected() -> None:
    for call, words in (
        (lambda: hs.top("demo", k="many"), "whole number, not 'many'"),
        (lambda: hs.wiring("demo", rule="best"), "rule must be one of top, top-per-target"),
        (lambda: hs.hubs("demo", [3]), "pairing must be"),
        (lambda: hs.hubs(3), "not a model reference"),
        (lambda: hs.projection_kernel(np.eye(3), np.eye(4)), "(3, 3) and (4, 4)"),
    ):
        with pytest.raises(hs.HeadspanError) as caught:
            call()
        assert words in str(caught.value)
