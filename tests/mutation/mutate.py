"""Do the tests notice when the code is wrong? Break one thing at a time and see whether a test fails.

    python tests/mutation/mutate.py areas evaluation --sample 60 --seed 1

Mutants: arithmetic and comparison operators exchanged, ``and`` for ``or``, ``not`` left out, numbers and truth values
changed, ``min`` for ``max`` and the like, statements left out, the part before ``if`` and ``else`` exchanged. What only
words an error (anything inside ``raise``, f-strings, docstrings, annotations) is left alone. Every mutant runs in a
fork of one process that has the heavy libraries loaded, with the quick tests of its module. Survivors are printed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[2]
SECONDS = 150  # a mutant that takes longer is caught: it does not end
_SCORING = ("test_safeguards.py", "test_subspaces.py", "test_scoring.py", "test_scoring_core.py", "test_numerics.py")
_RUNS = ("test_scoring.py", "test_scoring_core.py", "test_resume.py")
_NODES = "test_nodes_results.py::test_a_similarity_undefined_for_nodes_is_left_out_with_a_message"
_LATENT = (
    "test_latent.py::test_chance_inside_a_layer[deepseek_v3]",
    "test_latent.py::test_chance_inside_a_layer_is_kept_for_pairings_with_such_pairs[deepseek_v3]",
)
_SCREENED = (
    "test_screening.py::test_a_screened_result_is_not_taken_for_a_whole_one",
    "test_screening.py::test_what_screening_cannot_do",
)
TESTS = {
    "statistics.areas": ("test_evaluation.py",),
    "paper.evaluation": ("test_evaluation.py", "test_pair_sets.py"),
    "statistics.baseline": ("test_baseline.py", "test_pair_sets.py"),
    "statistics.significance": ("test_baseline.py", "test_tails.py", "test_pair_sets.py"),
    "subspaces.random_subspaces": ("test_baseline.py", "../src/headspan/subspaces/random_subspaces.py"),
    "statistics.tails": ("test_tails.py",),
    "statistics.hubs": ("test_hubs.py", "test_pair_sets.py"),
    "reading.node_overlaps": ("test_nodes.py",),
    "node_kinds.search": ("test_nodes.py",),
    "graphs.path_search": ("test_paths.py",),
    "graphs.paths": ("test_paths.py",),
    "scoring.screening": ("test_screening.py",),
    "subspaces.sketches": ("test_safeguards.py", "test_screening.py"),
    "subspaces.bases": _SCORING,
    "subspaces.metrics": _SCORING,
    "scoring.arrangement": ("test_arrangement.py",),
    "scoring.contraction": ("test_arrangement.py", *_SCORING),
    "scoring.factors": _SCORING,
    "scoring.assembly": (*_RUNS, *_LATENT, _NODES),
    "scoring.plan": (*_RUNS, "test_latent.py::test_similarities_inside_a_head_need_one_width[deepseek_v3]", _NODES),
    "scoring.run": (*_RUNS, *_SCREENED),
    "scoring.tiles": ("test_resume.py",),
    "subspaces.matrices": ("test_subspaces.py", "../src/headspan/subspaces/matrices.py"),
}
# Tests of real models and of whole processes are slow, and what they see the others see too.
_SLOW = ("gpt2", "smollm2", "certificates_hold", "outside", "folded_logits", "kill_at_any", "two_runs")
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any",
    "nanmax": "nanmin", "cumsum": "cumprod", "mean": "sum", "log": "log1p",
}  # fmt: skip
Change = Callable[[], None]


class Mutant(NamedTuple):
    """One change to a module: where, what, and the changed tree."""

    line: int
    what: str
    tree: ast.Module


def mutants(source: str) -> list[Mutant]:
    """All changes to a module, one at a time."""
    tree = ast.parse(source)
    found = []
    for number in range(sum(1 for _ in _changes(tree))):
        changed = copy.deepcopy(tree)
        node, what, apply = next(c for i, c in enumerate(_changes(changed)) if i == number)
        apply()
        found.append(Mutant(node.lineno, what, ast.fix_missing_locations(changed)))
    return found


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, Change]]:
    for node in _code(tree):
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
            other = _OPERATORS[type(node.op)]
            yield node, f"{type(node.op).__name__} → {other.__name__}", lambda n=node, o=other: setattr(n, "op", o())
        elif isinstance(node, ast.Compare):
            other = _OPERATORS[type(node.ops[0])]
            what = f"{type(node.ops[0]).__name__} → {other.__name__}"
            yield node, what, lambda n=node, o=other: n.ops.__setitem__(0, o())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
            what = f"{type(node.op).__name__} left out"
            yield node, what, lambda n=node: setattr(n, "op", ast.UAdd() if isinstance(n.op, ast.USub) else _nothing(n))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, f"{node.value} → {not node.value}", lambda n=node: setattr(n, "value", not n.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            value = node.value * 2 if isinstance(node.value, float) and node.value else node.value + 1
            yield node, f"{node.value} → {value}", lambda n=node, v=value: setattr(n, "value", v)
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            yield node, f"{node.id} → {_NAMES[node.id]}", lambda n=node: setattr(n, "id", _NAMES[n.id])
        elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
            yield node, f"{node.attr} → {_NAMES[node.attr]}", lambda n=node: setattr(n, "attr", _NAMES[n.attr])
        elif isinstance(node, ast.IfExp):
            yield node, "if and else exchanged", lambda n=node: _exchange(n)
        elif _is_removable(node):
            yield node, f"left out: {ast.unparse(node)[:60]}", lambda n=node: _leave_out(tree, n)


def _is_removable(node: ast.AST) -> TypeGuard[ast.stmt]:
    """A call for its effect, or an assignment into an array: the code runs without it."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that computes: no annotations, no texts, nothing inside raise."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.Raise, ast.JoinedStr, ast.AnnAssign)):
                yield from _code(child)
            elif isinstance(child, ast.AnnAssign) and child.value is not None:
                yield from _code(child.value)


def _nothing(node: ast.UnaryOp) -> ast.unaryop:
    """``not x`` and ``~x`` become x twice negated."""
    node.operand = ast.UnaryOp(op=type(node.op)(), operand=node.operand)
    return node.op


def _exchange(node: ast.IfExp) -> None:
    node.body, node.orelse = node.orelse, node.body


def _leave_out(tree: ast.Module, node: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and node in value:
                value[value.index(node)] = ast.Pass(lineno=node.lineno, col_offset=0)
                return


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a module its changed code when it is imported."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, fullname: str, path: object = None, target: object = None):
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def survives(name: str, path: Path, tree: ast.Module | None, tests: Sequence[str]) -> bool:
    """Whether all tests pass with this code, in a process of its own; None stands for the code as it is."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    signal.alarm(SECONDS)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import pytest

    if tree is not None:
        sys.meta_path.insert(0, _Changed(name, path, tree))
    files = [str(ROOT / "tests" / test) for test in tests]
    quick = " and ".join(f"not {word}" for word in _SLOW)
    # pytest's own rewriting of assertions would read a module whose examples are run from its file, unchanged.
    how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--assert=plain"]
    os._exit(int(pytest.main([*how, "-k", quick, *files])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", help=f"of {', '.join(TESTS)}, or the last part of a name")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each module, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, nargs="+", help="only mutants of these lines")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import hypothesis
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork

    # A slow example must not count as a mutant that was noticed, nor chance decide between two runs.
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, max_examples=40)
    hypothesis.settings.load_profile("mutation")
    for name in (full for full in TESTS if full in options.modules or full.split(".")[1] in options.modules):
        path = ROOT / "src" / "headspan" / (name.replace(".", "/") + ".py")
        full = f"headspan.{name}"
        if not survives(full, path, None, TESTS[name]):
            sys.exit(f"the tests of {name} fail as they are")
        every = mutants(path.read_text(encoding="utf-8"))
        every = [mutant for mutant in every if options.lines is None or mutant.line in options.lines]
        drawn = random.Random(options.seed).sample(every, min(options.sample or len(every), len(every)))
        left = []
        for mutant in sorted(drawn, key=lambda m: m.line):
            if survives(full, path, mutant.tree, TESTS[name]):
                left.append(mutant)
                print(f"{name}:{mutant.line}: {mutant.what}", flush=True)
        killed = len(drawn) - len(left)
        print(
            f"{name}: {killed} of {len(drawn)} caught ({killed / max(len(drawn), 1):.0%}), {len(every)} in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
