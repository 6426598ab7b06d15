"""Do the tests notice when the code is wrong? Break one thing at a time and see whether a test fails.

    python tests/mutation/mutate.py areas evaluation --sample 60 --seed 1

Mutants: arithmetic and comparison operators exchanged, ``and`` for ``or``, ``not`` left out, numbers and truth values
changed, ``min`` for ``max`` and the like, statements left out, the part before ``if`` and ``else`` exchanged. What only
words an error (anything inside ``raise``, f-strings, docstrings, annotations) is left alone. Every mutant runs in a
fork of one process that has collected the quick tests of its module (see TESTS), and the first failure ends it.
Survivors are printed; docs/trust.md lists those that change no result.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

ROOT = Path(__file__).parents[2]
_CRASHED = 99
_LEFT, _CAUGHT, _AGAIN, _FAILED = "left\n", "caught\n", "again\n", "failed\n"
SECONDS = 20  # a mutant that takes so much longer than three times the unchanged code is caught: it does not end
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
_NO_FLOORS = ("not stays_under", "not behind_a_latent", "not gguf_package")
_NO_MODELS = ("not lens", "not peft", "not experts", "not formulas", "not many_ways", "not where_a_feature")
_ADAPTER_NODES = (
    "test_nodes.py::test_adapter_made_by_peft",
    "test_nodes.py::test_modules_of_an_adapter_behind_layer_norms",
    "test_nodes.py::test_modules_of_an_adapter_behind_rms_norms_and_an_unembedding_of_its_own",
    "test_nodes.py::test_modules_of_an_adapter_on_one_expert",
    "test_nodes.py::test_modules_of_an_adapter_behind_a_latent",
    "test_nodes.py::test_an_adapter_of_another_model_is_refused",
    "test_uneven.py::test_an_adapter_of_a_mixture_with_its_own_norms",
)
# Files or tests of each module; "not word" leaves out those with the word in their name, which have no part in it.
TESTS = {
    "statistics.areas": ("test_evaluation.py",),
    "paper.evaluation": ("test_evaluation.py", "test_pair_sets.py"),
    "statistics.baseline": ("test_baseline.py", "test_pair_sets.py"),
    "statistics.significance": ("test_baseline.py", "test_tails.py", "test_pair_sets.py"),
    "subspaces.random_subspaces": ("test_baseline.py", "../src/headspan/subspaces/random_subspaces.py"),
    "statistics.tails": ("test_tails.py",),
    "statistics.hubs": ("test_hubs.py", "test_pair_sets.py"),
    "reading.node_overlaps": ("test_nodes.py", *_NO_MODELS),
    "node_kinds.search": ("test_nodes.py", *_NO_MODELS),
    "node_kinds.node_sets": (
        "test_node_files.py",
        "test_nodes.py",
        "../src/headspan/node_kinds/node_sets.py",
        *_NO_MODELS,
    ),
    "node_kinds.adapters": ("test_nodes_kinds.py::test_from_score_to_the_page[llama-adapter]", *_ADAPTER_NODES),
    "graphs.path_search": ("test_paths.py", "not simulation", "not random_weights"),
    "graphs.paths": ("test_paths.py", "not simulation", "not random_weights"),
    "graphs.chains": ("test_paths.py",),
    "change.diff": (
        "test_drift.py",
        "test_adapters.py::test_what_the_adapter_does_not_touch_does_not_move",
        *_NO_FLOORS,
        "not effects",
    ),
    "change.edge_changes": ("test_drift.py", *_NO_FLOORS, "not effects", "not planted", "not command", "not refus"),
    "change.rounding": ("test_rounding_floor.py", "test_drift.py"),
    "models.adapters": ("test_adapters.py",),
    "models.families.latent_attention": ("test_latent.py", "../src/headspan/models/families/latent_attention.py"),
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
# Tests of whole processes are slow, and what they see the others see too.
_SLOW = ("certificates_hold", "outside", "folded_logits", "kill_at_any", "two_runs")
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


def in_function(tree: ast.Module, line: int) -> bool:
    """Whether a line is in the body of a function, whose code can be exchanged after the module was imported."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return any(node.lineno < node.body[0].lineno <= line <= (node.end_lineno or 0) for node in functions)


def _exchange_code(old: Mapping[str, object], new: Mapping[str, object], module: str) -> None:
    """Gives the functions of a module, and of its classes, the code of those of the same names."""
    for key, value in new.items():
        mine = old.get(key)
        if isinstance(value, type) and isinstance(mine, type) and value.__module__ == module:
            _exchange_code(vars(mine), vars(value), module)
        elif (function := _function(mine)) and (other := _function(value)):
            function.__code__ = other.__code__


def _function(value: Any) -> FunctionType | None:
    """The function inside whatever decorators made of it."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        if getattr(value, name, None) is not None and not isinstance(value, type):
            return _function(getattr(value, name))
    return value if isinstance(value, FunctionType) else None


def _forked(work: Callable[[], int], seconds: int) -> int:
    """What work returns in a process of its own, or another number than 0 if it ends otherwise or not in time."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(status)
    signal.alarm(seconds)
    try:
        os._exit(work())
    finally:
        os._exit(_CRASHED)


class _Trials:
    """Collects the tests once and runs them for the code as it is, then for each mutant, each time in a fork.

    The test that caught the last mutants comes first.
    """

    def __init__(self, module: str, path: Path, tried: Sequence[Mutant], say: Callable[[str], None]) -> None:
        self.module, self.path, self.tried, self.say = module, path, tried, say

    def pytest_runtestloop(self, session: Any) -> bool:
        importlib.import_module(self.module)  # tests may import it only as they run
        order = list(session.items)
        started = time.monotonic()
        unchanged = Mutant(0, "", ast.parse(self.path.read_text(encoding="utf-8")))
        if _forked(lambda: self._run(session, order, unchanged), 0):
            self.say(_FAILED)
            return True
        seconds = SECONDS + 3 * math.ceil(time.monotonic() - started)
        for mutant in self.tried:
            reader, writer = os.pipe()
            status = _forked(lambda m=mutant, w=writer: self._run(session, order, m, w), seconds)
            os.close(writer)
            with os.fdopen(reader) as file:
                caught_by = file.read()
            self.say(_AGAIN if status == _CRASHED else _CAUGHT if status else _LEFT)
            order.sort(key=lambda item: item.nodeid != caught_by)
        return True

    def _run(self, session: Any, order: Sequence[Any], mutant: Mutant, writer: int = -1) -> int:
        fresh = {"__name__": self.module, "__file__": str(self.path)}
        exec(compile(mutant.tree, str(self.path), "exec"), fresh)
        _exchange_code(vars(sys.modules[self.module]), fresh, self.module)
        for item, after in zip(order, [*order[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldfail:
                if writer >= 0:
                    os.write(writer, item.nodeid.encode())
                return 1
        return 0


def survivors(module: str, path: Path, drawn: Sequence[Mutant], tests: Sequence[str]) -> Iterator[Mutant]:
    """The mutants with which all tests pass; an error if these fail with the code as it is."""
    inside = [mutant for mutant in drawn if in_function(mutant.tree, mutant.line)]
    outside = [mutant for mutant in drawn if mutant not in inside]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        trials = _Trials(module, path, inside, lambda answer: (os.write(writer, answer.encode()), None)[1])
        os._exit(_pytest(tests, trials))
    os.close(writer)
    answered = 0
    with os.fdopen(reader) as file:
        for mutant, answer in zip(inside, file, strict=False):
            answered += answer != _FAILED
            if answer == _LEFT:
                yield mutant
            elif answer == _AGAIN:
                outside.append(mutant)
    os.waitpid(child, 0)
    if answered != len(inside):
        sys.exit(f"the tests of {module} fail as they are")
    for mutant in outside:
        if not _forked(lambda m=mutant: _imported(module, path, m, tests), 30 * SECONDS):
            yield mutant


def _imported(module: str, path: Path, mutant: Mutant, tests: Sequence[str]) -> int:
    """Runs the tests with a mutant that is there from the import of its module on."""
    sys.meta_path.insert(0, _Changed(module, path, mutant.tree))
    return _pytest(tests)


def _pytest(tests: Sequence[str], *plugins: object) -> int:
    import pytest

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    files = [str(ROOT / "tests" / test) for test in tests if not test.startswith("not ")]
    quick = " and ".join([*(f"not {word}" for word in _SLOW), *(test for test in tests if test.startswith("not "))])
    # pytest's own rewriting of assertions would read a module whose examples are run from its file, unchanged.
    how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--assert=plain"]
    return int(pytest.main([*how, "-k", quick, *files], plugins=list(plugins)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", help=f"of {', '.join(TESTS)}, or the last part of a name")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each module, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, nargs="+", help="only mutants of these lines")
    parser.add_argument("--functions", action="store_true", help="only mutants inside functions, which run fastest")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    import hypothesis
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork
    for variable in [name for name in os.environ if name.startswith("HEADSPAN_")]:
        del os.environ[variable]  # tests of real models are slow, and what they see the others see too

    # A slow example must not count as a mutant that was noticed, nor chance decide between two runs.
    hypothesis.settings.register_profile("mutation", deadline=None, derandomize=True, max_examples=40)
    hypothesis.settings.load_profile("mutation")
    for name in (full for full in TESTS if full in options.modules or full.rpartition(".")[2] in options.modules):
        path = ROOT / "src" / "headspan" / (name.replace(".", "/") + ".py")
        full = f"headspan.{name}"
        every = mutants(path.read_text(encoding="utf-8"))
        every = [mutant for mutant in every if options.lines is None or mutant.line in options.lines]
        if options.functions:
            every = [mutant for mutant in every if in_function(mutant.tree, mutant.line)]
        drawn = random.Random(options.seed).sample(every, min(options.sample or len(every), len(every)))
        left = []
        for mutant in survivors(full, path, sorted(drawn, key=lambda m: m.line), TESTS[name]):
            left.append(mutant)
            print(f"{name}:{mutant.line}: {mutant.what}", flush=True)
        killed = len(drawn) - len(left)
        print(
            f"{name}: {killed} of {len(drawn)} caught ({killed / max(len(drawn), 1):.0%}), {len(every)} in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
