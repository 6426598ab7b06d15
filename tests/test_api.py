"""One API: names of arguments, old names, notes, messages, and functions that equal the commands."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import headspan as hs
from headspan.cli import _run, app
from headspan.cli.notes import in_options
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
from notices import noticed

SOURCE = Path(hs.__file__).parent
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
FUNCTIONS = {name: f for name in hs.__all__ if inspect.isfunction(f := getattr(hs, name))}


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    return hs.score("demo")


@pytest.fixture(scope="module")
def saved(scores: hs.Scores, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "demo.safetensors"
    scores.save(path)
    return path


# ----------------------------------------------------------------------------------------------- names of arguments


def test_one_name_per_argument() -> None:
    old = {"weights", "metrics", "pairings", "ref", "refs", "base", "texts", "results", "say", "used", "path"}
    found = {name: old & set(inspect.signature(f).parameters) for name, f in FUNCTIONS.items()}
    found |= {f"Scores.{n}": old & set(inspect.signature(getattr(hs.Scores, n)).parameters) for n in ("top", "around")}
    assert {name: names for name, names in found.items() if names} == {"load": {"path"}}


RENAMED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ref": (lambda: hs.open(ref="demo").reference, lambda: hs.open(model="demo").reference),
    "weights of fold": (lambda: hs.fold(weights="demo").folding, lambda: hs.fold(model="demo").folding),
    "score": (
        lambda: hs.score(weights="demo", metrics="pk", pairings="OK"),
        lambda: hs.score(model="demo", metric="pk", pairing="OK"),
    ),
    "top": (lambda: hs.top("demo", pairings="OK"), lambda: hs.top("demo", pairing="OK")),
    "around": (lambda: hs.around("demo", "L1H2", pairings="OK"), lambda: hs.around("demo", "L1H2", pairing="OK")),
    "compare": (
        lambda: hs.compare("demo", "demo", metrics="pk", pairings="OK"),
        lambda: hs.compare("demo", "demo", metric="pk", pairing="OK"),
    ),
    "tokens": (lambda: hs.tokens(weights="demo", head="L0H0"), lambda: hs.tokens(model="demo", head="L0H0")),
    "pair": (
        lambda: hs.pair(weights="demo", source="L0H3.O", target="L1H0.K", top=2).to_dict(),
        lambda: hs.pair(model="demo", source="L0H3.O", target="L1H0.K", k=2).to_dict(),
    ),
    "wiring": (lambda: hs.wiring("demo", pairings="OK", k=3).rows(), lambda: hs.wiring("demo", "OK", k=3).rows()),
    "paths": (lambda: hs.paths("demo", depth=1, pairings="OK"), lambda: hs.paths("demo", depth=1, pairing="OK")),
    "nodes": (
        lambda: hs.nodes("demo", add=hs.Node(np.ones(256), "ones", 1), k=1).rows(),
        lambda: hs.nodes("demo", nodes=hs.Node(np.ones(256), "ones", 1), k=1).rows(),
    ),
    "diff": (lambda: hs.diff(base="demo", other="demo", k=1).k, lambda: hs.diff(model="demo", other="demo", k=1).k),
    "evaluate": (
        lambda: hs.evaluate("demo", "behaviour", metrics="pk").rows(),
        lambda: hs.evaluate("demo", "behaviour", metric="pk").rows(),
    ),
}


@pytest.mark.parametrize("name", [name for name in RENAMED if name != "evaluate"])
def test_old_names_work_with_a_warning(name: str) -> None:
    old, new = RENAMED[name]
    with pytest.warns(DeprecationWarning, match=r"is now .*=\); the old name will be removed") as seen:
        found = old()
    assert {Path(one.filename).name for one in seen} == {"test_api.py"}  # the line that uses the old name
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert found == new()


def test_both_names_of_one_argument() -> None:
    with pytest.raises(TypeError, match="metrics and metric"):
        hs.score("demo", metrics="pk", metric="pk")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["head_tokens", "compare_pair", "head_scores", "summarise", "scores_of", "all_tokens"])
def test_names_of_version_01_are_gone(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(hs, name)


def test_lists_where_the_singular_is_spelled(scores: hs.Scores) -> None:
    both = hs.top(scores, ["OQ", "OK"], 2, metric=["pk", "cs"])
    assert [(edge.metric, str(edge.pairing)) for edge in both[::2]] == [
        ("pk", "OQ"), ("pk", "OK"), ("cs", "OQ"), ("cs", "OK"),
    ]  # fmt: skip
    assert {edge.metric for edge in scores.around("L1H2", 1, metric=["pk", "cs"]).incoming} == {"pk", "cs"}
    assert hs.wiring(scores, ["OK"], ["pk"], 3) == hs.wiring(scores, "OK", "pk", 3)
    assert hs.significance(scores, ["OK"], metric=["pk"]) == hs.significance(scores, "OK")
    assert hs.hubs(scores, "OK", ["pk"]) == hs.hubs(scores, "OK")
    for call in (
        lambda: hs.wiring(scores, metric=["pk", "cs"]),
        lambda: hs.hubs(scores, metric=["pk", "cs"]),
        lambda: hs.significance(scores, "OK", metric="pk,cs"),
        lambda: hs.significance(scores, ["OK", "OQ"]),
    ):
        with pytest.raises(HeadspanError, match=r"one (similarity|pairing) at a time, not .*: choose one"):
            call()


# ------------------------------------------------------------------------------------------------- notes in Python


def test_labels_of_other_weights_warn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    foreign = hs.score({role: rng.normal(size=(12, 12, 24, 2)) for role in "QKVO"}, "pk", "all")
    for call in (
        lambda: hs.evaluate(foreign, "gpt2-ioi"),
        lambda: hs.wiring(foreign, labels="gpt2-ioi"),
        lambda: hs.top(foreign, labels="gpt2-ioi"),
        lambda: hs.report(foreign, labels="gpt2-ioi"),
    ):
        with pytest.warns(HeadspanWarning, match="gpt2-ioi") as seen:
            call()
        assert {Path(one.filename).name for one in seen} == {"test_api.py"}


def test_notes_about_a_model_reach_python_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(SOURCE / "data" / "demo", model)
    (model / "pytorch_model.bin").touch()
    with pytest.warns(HeadspanWarning, match=r"pytorch_model\.bin .*not read"):
        hs.score(model, "pk", "OK")
    for _ in range(2):  # Python's filter shows a warning once per line; a command shows it every time, once
        assert _run(["score", str(model), "--out", str(tmp_path / "r.safetensors"), "-m", "pk", "-p", "OK"]) == 0
        assert capsys.readouterr().err.count("warning: pytorch_model.bin in the same") == 1


def test_progress_is_logged_and_not_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadspanWarning)
        with noticed() as told:
            hs.score("demo", "pk", "OK", screen=3)
    assert told == [told[0]] and told[0].startswith("OK: 3 of the 3 strongest pairs are certified")


# ------------------------------------------------------------------------------------------------------- messages


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Every string of the modules that are not the command line, without documentation."""
    found: list[tuple[str, str]] = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "cli":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                found.append((str(path.relative_to(SOURCE)), node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values)
                found.append((str(path.relative_to(SOURCE)), "".join(parts)))
    return found


def test_the_library_names_no_options_and_no_commands() -> None:
    wrong = re.compile(rf"(?<![\w(-])--(?!role-|x:x)[a-z]|headspan ({'|'.join(COMMANDS)})\b(?! ?report\")")
    found = [(place, text) for place, text in texts() if wrong.search(text) and "<iframe" not in text]
    assert not found


def test_code_in_messages_is_that_of_a_command_too() -> None:
    """What the library writes in backquotes, the command line prints as options and commands that exist."""
    seen = set()
    options = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    for place, text in texts():
        # x is a name that is filled in; hs.significance alone has an approximation
        for code in set(re.findall(r"`([^`]+)`", text)) - {"x", "approximation"}:
            typed = in_options(f"`{code}`").split()
            seen.add(code)
            assert "`" not in " ".join(typed), f"{place}: {code} cannot be printed as options"
            if typed[0] == "headspan":
                assert typed[1] in COMMANDS, f"{place}: there is no command {typed[1]}"
                known = {option for parameter in COMMANDS[typed[1]].params for option in parameter.opts}
                assert {word for word in typed[2:] if word.startswith("-")} <= known, f"{place}: {' '.join(typed)}"
            else:
                assert typed[0] in options, f"{place}: there is no option {typed[0]}"
    assert len(seen) > 30


def test_python_and_the_command_line_speak_their_own_language(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HeadspanError, match=r"Leave out `route`$"):
        hs.score("demo", "pk", screen=3, route="gram")
    line = f"score demo --out {tmp_path / 'r.safetensors'} --screen 3 --route gram"
    assert _run(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("headspan: ") and said.endswith("--route\n") and said.count("\n") == 1
    assert in_options("a file named `x`y") != "" and in_options("`1 +` and `import os`") == "`1 +` and `import os`"


# ------------------------------------------------------------------------- an argument that is given is never ignored

IGNORED: dict[str, Callable[[hs.Scores, str], Any]] = {
    "labels of top": lambda s, f: hs.top(s, labels="/does/not/exist.csv"),
    "label of top": lambda s, f: hs.top(s, label="induction"),
    "delta": lambda s, f: hs.score("demo", delta=0.1),
    "seed of score": lambda s, f: hs.score("demo", seed=1),
    "route": lambda s, f: hs.score("demo", "pk", screen=2, route="gram"),
    "approximation": lambda s, f: hs.significance(s, "OK", null="reversed", approximation="loose"),
    "q": lambda s, f: hs.wiring(s, q=0.1),
    "null": lambda s, f: hs.wiring(s, null="reversed"),
    "k of significance": lambda s, f: hs.wiring(s, rule="significance", k=5),
    "k of threshold": lambda s, f: hs.wiring(s, rule="threshold", minimum=1.0, k=5),
    "pairing of a circuit": lambda s, f: hs.wiring(s, "OK", circuit=hs.paths("demo", depth=1).to_circuit()),
    "k of a circuit": lambda s, f: hs.wiring(s, k=3, circuit=hs.paths("demo", depth=1).to_circuit()),
    "seed of evaluate": lambda s, f: hs.evaluate(s, hs.Labels.from_pairs([("L0H0", "a"), ("L0H1", "a")]), seed=1),
    "model of paths": lambda s, f: hs.paths("demo", model="demo"),
    "tokens of report": lambda s, f: hs.report(s, tokens=3),
    "labels of a change": lambda s, f: hs.report(hs.diff("demo", "demo"), labels="gpt2"),
    "tokens of site": lambda s, f: hs.site(f, s, tokens=3),
    "model of figures": lambda s, f: hs.figures("demo", f, "scatter", model="demo"),
    "k of figures": lambda s, f: hs.figures(s, f, "scatter", k=3),
    "text of figures": lambda s, f: hs.figures(s, f, "scatter", text="words"),
    "run of figures": lambda s, f: hs.figures(s, f, "scatter", run=True),
    "seed of text": lambda s, f: hs.behaviour("demo", text="some words", seed=1),
    "sequences of text": lambda s, f: hs.behaviour("demo", text="some words", sequences=3),
    "best": lambda s, f: hs.behaviour("demo", sequences=2, length=8).labels(best=3, threshold=0.5),
    "k of effects": lambda s, f: hs.effects("demo", k=3),
    "sequences of effects": lambda s, f: hs.effects("demo", text="some words", sequences=3),
    "length of effects": lambda s, f: hs.effects("demo", tokens=[[1, 2, 3]], length=3),
    "floor": lambda s, f: hs.effects("demo", draws=0, floor=0.1),
    "draws": lambda s, f: hs.effects("demo", shared=2, draws=3),
    "seed of effects": lambda s, f: hs.effects("demo", tokens=[[1, 2, 3]], draws=0, seed=3),
    "bos": lambda s, f: hs.effects("demo", tokens=[[1, 2, 3]], bos="yes"),
}
_TORCH = ("seed of text", "sequences of text", "best", "effects", "floor", "draws", "bos")


@pytest.mark.parametrize("name", IGNORED)
def test_an_argument_without_effect_is_refused(name: str, scores: hs.Scores, tmp_path: Path) -> None:
    if name.endswith(_TORCH):
        pytest.importorskip("torch")
    with pytest.raises(HeadspanError, match=r"no effect|[Ll]eave|needs labels|no label file|there (is|are) no"):
        IGNORED[name](scores, str(tmp_path / "out"))


SERIES_OPTIONS = ["--steps 1", "--last 1", "-k 3", "--fold", "--run", "--keep", "--memory 1GB", "--allow-duplicates"]
IGNORED_LINES = [
    "top {file} --head L1H2 --layer 1",
    "top {file} --labels /does/not/exist.csv",
    "baseline {file} -k 3",
    "baseline {file} --null reversed",
    "wiring {file} --dpi 100",
    "wiring {file} --ellipse --out {new}.csv",
    "wiring {file} --rule significance -k 5",
    "evaluate {file} --labels behaviour --bootstrap 0 --seed 1",
    "tokens demo --norms --role O",
    "tokens demo --norms -k 3",
    "tokens demo --norms --preprocess centre",
    "pair demo L0H3.O L1H0.K --effects -k 3",
    "pair demo L0H3.O L1H0.K --effects --fold",
    "report {file} --out {new}.html --metric pk",
    "report {file} --out {new}.html --pairing OK",
    "report demo --out {new}.html --weights demo",
    "report {file} --out {new}.html --tokens 3",
    "figures {file} --out {new} --only scatter -k 3",
    "effects demo --metric pk",
    "effects demo --summary -k 3",
    "effects demo --summary --draws 3",
    "effects demo --all -k 3",
    "behaviour demo --prompt words --seed 3",
    "behaviour demo --best 3",
    "score demo --out {new}.safetensors --seed 3",
    *(f"track {{series}} {option}" for option in SERIES_OPTIONS),
]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("series") / "run.safetensors"
    rng = np.random.default_rng(0)
    models = [hs.open({role: rng.normal(size=(2, 2, 12, 3)) for role in "QKVO"}) for _ in range(2)]
    hs.track(models).save(path)
    return path


@pytest.mark.parametrize("line", IGNORED_LINES)
def test_an_option_without_effect_is_refused(
    line: str, saved: Path, series: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.format(file=saved, series=series, new=tmp_path / "new").split()
    assert _run(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not list(tmp_path.iterdir()), said


def test_labels_of_top_are_columns(scores: hs.Scores) -> None:
    labels = hs.Labels.from_pairs([("L0H3", "writer"), ("L1H0", "reader")])
    row = hs.top(scores, "OK", 1, labels=labels).rows()[0]
    assert (row["source_labels"], row["target_labels"]) == ("writer", "reader")
    assert "source_labels" not in hs.top(scores, "OK", 1).rows()[0]


# ------------------------------------------------------------------------------------------- functions and commands

PRINTING = {"as_json", "as_csv", "out", "force", "show"}  # where and how a command prints
NODES = {"sae", "adapter", "neurons", "tokens", "components"}  # the argument nodes, one option per kind
ELSEWHERE = {  # command and option -> the argument that does this in Python
    "top head": "around head",
    "hubs k": "Hubs.rows k",
    "hubs corrected": "Hubs.rows corrected",
    "hubs labels": "top labels",
    "baseline pairing": "significance pairing",
    "baseline null": "significance null",
    "baseline k": "Significance.rows k",
    "pair effects": "effects_curve model",
    "effects summary": "effects_summary effects",
    "effects metric": "effects_summary metric",
    "effects every": "effects k",  # no k, every edge
    "behaviour prompt": "behaviour text",
    "behaviour k": "BehaviourScores.top k",
    "behaviour labels_out": "BehaviourScores.labels best",
    "behaviour best": "BehaviourScores.labels best",
    "behaviour threshold": "BehaviourScores.labels threshold",
    "tokens all_heads": "all_tokens roles",
    "tokens norms": "norm_correlations weights",
    "wiring ellipse": "save_wiring ellipse",
    "wiring dpi": "save_wiring dpi",
    "diff table": "Diff.records table",
    "track table": "Series.records table",
    "report metric": "score metric",
    "report pairing": "score pairing",
    "reproduce everything": "Reproduction.rows",
    "score download": "open download",
    "score observe": "observe model",
    "effects stats": "effects_summary stats",
    "evaluate circuit": "circuit_overlap circuit",
    "task circuit_out": "Task.to_circuit",
    "task graph_out": "Task.save_graph path",
}


def _named(path: str) -> Any:
    """A public function, a method of a result, or a function of a module."""
    from headspan.change.diff import Diff
    from headspan.paper.reproduction import Reproduction
    from headspan.plotting import save_wiring
    from headspan.reading.tokens import all_tokens, norm_correlations
    from headspan.results.head_scores import BehaviourScores
    from headspan.statistics.hubs import Hubs
    from headspan.statistics.significance import Significance

    local = {one.__name__: one for one in (Diff, Reproduction, save_wiring, all_tokens, norm_correlations, Hubs)}
    local |= {"BehaviourScores": BehaviourScores, "Significance": Significance, "Series": hs.Series}
    first, _, rest = path.partition(".")
    found = local.get(first) or getattr(hs, first)
    if rest == "rows" and first == "Reproduction":
        return found
    return getattr(found, rest) if rest else found


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("skill", "mcp")])  # for other programs
def test_every_command_is_a_function(name: str) -> None:
    function = inspect.signature(getattr(hs, name)).parameters
    for option in (parameter.name for parameter in COMMANDS[name].params if parameter.name != "help"):
        if option in PRINTING or option in function or (option in NODES and "nodes" in function):
            continue
        if option == "fold":
            continue  # hs.fold(model)
        place, _, argument = ELSEWHERE[f"{name} {option}"].partition(" ")
        assert not argument or argument in inspect.signature(_named(place)).parameters, f"{name} {option}"


def test_every_exception_is_needed() -> None:
    for place in ELSEWHERE:
        name, option = place.split()
        assert option in {parameter.name for parameter in COMMANDS[name].params}, place
        assert option not in inspect.signature(getattr(hs, name)).parameters, place


def test_figures_and_cache(scores: hs.Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = hs.figures(scores, tmp_path / "figures", ["scatter", "norms"], ["png", "svg"])
    assert [path.name for path in drawn.files] == ["scatter.png", "scatter.svg"]
    assert list(drawn.skipped) == ["norms"] and "`model`" in drawn.skipped["norms"]
    monkeypatch.setenv("HEADSPAN_CACHE_DIR", str(tmp_path / "cache"))
    assert list(hs.cache()) == [] and hs.cache("x", clear=True).rows() == []


def test_effects_go_into_a_result(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from headspan.results.effects import effects_of

    path = tmp_path / "r.safetensors"
    path.write_bytes(saved.read_bytes())
    found = hs.effects("demo", random=True, sequences=2, length=12, into=path)
    np.testing.assert_array_equal(effects_of(hs.load(path)).of("OK"), found.of("OK"))
    habits = hs.behaviour("demo", sequences=2, length=8, into=path)
    assert hs.load(path).annotations["behaviour"]["induction"] == habits.to_dict()["induction"]
    other = tmp_path / "other.safetensors"
    hs.score({role: np.random.default_rng(0).normal(size=(2, 2, 12, 3)) for role in "QKVO"}, "pk", "OK").save(other)
    for measure in (hs.effects, hs.behaviour):
        with pytest.raises(HeadspanError, match=r"another model|of different models"):
            measure("demo", sequences=1, length=8, into=other)
    told = hs.effects_summary("demo", found, "pk")
    assert {row["predictor"] for row in told.rows()} >= {"pk raw", "layer distance"}
    curve = hs.effects_curve("demo", "L0H3.O", "L1H0.K", draws=1)
    assert curve.rows()[-1]["shared"] == pytest.approx(curve.whole, rel=1e-3)
