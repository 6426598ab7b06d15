"""Every result has the same interface: rows, to_pandas, to_dict, save, headspan.load, a short repr and HTML."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from attribution_graphs import for_demo
from headspan.checkpoints.hub.chunks import CHUNK, ChunkStore
from headspan.results import saving
from headspan.results.tabular import Tabular
from headspan.system.sealed_file import HASH, content_hash, read_sealed
from series_hub import write

HOSTILE = '<b onclick="x()">&amp;'
D = 256  # of the demo


def node(name: str = HOSTILE, seed: int = 0) -> hs.Node:
    return hs.Node(np.random.default_rng(seed).standard_normal(D), name, layer=1)


def of_paper() -> Any:
    """A reproduction without GPT-2: two numbers, one that differs."""
    from headspan.paper.reproduction import Reproduction, Row

    numbers = (Row("pk_mean", "OK", "1.0", "1.0", "agrees"), Row("pk_mean", HOSTILE, "1.0", "2.0", "differs", "a note"))
    return Reproduction({"reference": "gpt2"}, numbers, {"pk_mean": {"OK": 1.0}}, ("a remark",))


def summary(scores: hs.Scores) -> Any:
    found = hs.effects("demo", sequences=2, length=12, random=True, draws=0)
    return hs.effects_summary("demo", found, "pk", resamples=10)


# Public function -> a call that returns its result. The last part of a key only tells two calls apart.
RESULTS: dict[str, Callable[[hs.Scores], Any]] = {
    "score": lambda scores: scores,
    "top": lambda scores: hs.top(scores, "flow,OR", k=3),
    "top labelled": lambda scores: hs.top(scores, "OK", k=3, labels=hs.Labels({hs.Head(0, 3): (HOSTILE,)})),
    "around": lambda scores: hs.around(scores, "L1H2.K", k=3),
    "around node": lambda scores: hs.around(scores, HOSTILE, k=3),
    "compare": lambda scores: hs.compare(scores, scores),
    "diff": lambda scores: hs.diff("demo", tuned(), k=3),
    "track": lambda scores: series(),
    "hubs": lambda scores: hs.hubs(scores, "OK"),
    "hubs of nodes": lambda scores: hs.hubs(scores, "OR"),
    "hubs lists": lambda scores: hs.hubs(scores, ["OQ", "OK"]),
    "hubs inlet": lambda scores: hs.hubs(scores, "OK").inlet_corrected,
    "baseline": lambda scores: hs.baseline(scores),
    "baseline kl": lambda scores: hs.baseline(scores, kl=True),
    "significance": lambda scores: hs.significance(scores, "OK"),
    "significance reversed": lambda scores: hs.significance(scores, "OK", null="reversed"),
    "evaluate": lambda scores: hs.evaluate(scores, hs.behaviour("demo").labels(3), bootstrap=5),
    "circuit_overlap": lambda scores: hs.circuit_overlap(
        scores, hs.paths("demo", depth=1, k=9).to_circuit(HOSTILE), "pk", bootstrap=20
    ),
    "tokens": lambda scores: hs.tokens("demo", "L0H1", k=5),
    "pair": lambda scores: hs.pair("demo", "L0H3.O", "L1H2.K", top=3),
    "pair without roles": lambda scores: hs.pair("demo", "L0H3", "L1H2"),
    "behaviour": lambda scores: hs.behaviour("demo", sequences=2, length=12),
    "effects": lambda scores: hs.effects("demo", sequences=2, length=12, random=True),
    "effects_summary": summary,
    "observe": lambda scores: hs.observe("demo", random=True, sequences=2, length=12),
    "task": lambda scores: hs.task("demo", "induction", prompts=2, k=3, circuit=4, scores=scores),
    "effects_curve": lambda scores: hs.effects_curve("demo", "L0H3.O", "L1H2.K", draws=2),
    "paths": lambda scores: hs.paths("demo", depth=1, k=3, nodes=[node()]),
    "Circuit": lambda scores: hs.paths("demo", depth=1, k=3).to_circuit(HOSTILE),
    "wiring": lambda scores: hs.wiring(scores, "OK,OR", k=3),
    "nodes": lambda scores: hs.nodes("demo", [node(), node("other", 1)], k=3),
    "links": lambda scores: linked(),
    "info": lambda scores: hs.info("demo"),
    "info checked": lambda scores: hs.info("demo", check=True),
    "cache": lambda scores: cached(),
    "reproduce": lambda scores: of_paper(),
    "Scores matrix": lambda scores: scores["pk", "OR"],
}
# Public names that do not return a result, and what they are instead.
NO_RESULTS = {
    "weights of a model": ("open", "fold", "adapt"),
    "pages and figures": ("report", "site", "figures"),
    "numbers and arrays": ("subspace", "principal_angles", "projection_kernel"),
    "the vocabulary": (
        "Head",
        "Metric",
        "Node",
        "Pairing",
        "Port",
        "Role",
        "HeadspanError",
        "HeadspanWarning",
        "Labels",
    ),
    "reads all of them": ("load",),
}


def tuned() -> dict[str, np.ndarray]:
    """The weights of the demo, changed a little."""
    rng = np.random.default_rng(3)
    with hs.open("demo") as weights:
        known = {role: np.stack([weights.read(role, layer) for layer in weights.layers]) for role in "QKVO"}
    return {role: values + 0.01 * rng.standard_normal(values.shape) for role, values in known.items()}


def linked() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        transcoders, graph = for_demo(Path(folder))
        return hs.links("demo", graph, transcoders)


def series() -> hs.Series:
    with tempfile.TemporaryDirectory() as folder:
        return hs.track([write(Path(folder) / f"step{step}", step) for step in (0, 4, 8)], k=2)


def cached() -> Any:
    """A cache with parts of two files."""
    for name in (f"org/model/{HOSTILE}.safetensors", "org/other/model.safetensors"):
        store = ChunkStore("etag", 3 * CHUNK, "served", name, name)
        store.write(1, bytes(CHUNK))
    return hs.cache()


@pytest.fixture(scope="module")
def scores() -> hs.Scores:
    return hs.score("demo", nodes=[node()])


@pytest.fixture(scope="module")
def made(scores: hs.Scores) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known[name] = RESULTS[name](scores)
        return known[name]

    return make


def saved(result: Any, folder: Path) -> Path:
    path = folder / "r.safetensors"
    result.save(path)
    return path


# ------------------------------------------------------------------------------------------- nothing is left out


def test_every_public_name_is_a_result_or_known_not_to_be() -> None:
    results = {name.split()[0] for name in RESULTS}
    others = {name for names in NO_RESULTS.values() for name in names}
    classes = {"Series", "Effects", "Statistics", "Task"}  # what track, effects, observe and task return
    assert results | others | classes == {*hs.__all__, "Scores"}
    assert not results & others


def test_every_class_of_results_is_tested(made: Callable[[str], Any]) -> None:
    tested = {saving.kind_of(type(made(name))) for name in RESULTS if not isinstance(made(name), by_hand())}
    assert tested == set(saving.KINDS)
    assert {type(made(name)) for name in RESULTS} >= set(by_hand())


def by_hand() -> tuple[type, ...]:
    """The classes of JSON files."""
    return tuple(saving.class_of(where) for where in saving.JSON_KINDS.values())


def test_a_class_that_is_not_in_the_table_is_noticed(tmp_path: Path) -> None:
    class Forgotten(Tabular):
        def rows(self) -> list[dict[str, Any]]:
            return []

    with pytest.raises(TypeError, match="Forgotten is not in the table"):
        Forgotten().save(tmp_path / "f.safetensors")


# ------------------------------------------------------------------------------------------- the protocol


@pytest.mark.parametrize("name", RESULTS)
def test_rows_are_flat_and_alike(name: str, made: Callable[[str], Any]) -> None:
    rows = made(name).rows()
    assert rows and len({tuple(row) for row in rows}) == 1
    assert {type(value) for row in rows for value in row.values()} <= {str, int, float, bool, type(None)}


@pytest.mark.parametrize("name", [name for name in RESULTS if name != "Scores matrix"])
def test_the_data_frame_is_the_rows(name: str, made: Callable[[str], Any]) -> None:
    rows, frame = made(name).rows(), made(name).to_pandas()
    assert list(frame.columns) == list(rows[0]) and len(frame) == len(rows)
    for column in frame:
        for value, row in zip(frame[column], rows, strict=True):
            theirs = row[column]
            missing = theirs is None or (isinstance(theirs, float) and math.isnan(theirs))
            assert value != value or value is None if missing else value == theirs


@pytest.mark.parametrize("name", RESULTS)
def test_plain_values_go_there_and_back(name: str, made: Callable[[str], Any]) -> None:
    result = made(name)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    again = type(result).from_dict(content)
    assert again == result and again.to_dict() == result.to_dict()


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_saved_is_loaded(name: str, made: Callable[[str], Any], tmp_path: Path) -> None:
    result = made(name)
    path = saved(result, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = hs.load(path)
        assert type(result).load(path) == result
    assert type(again) is type(result) and again == result and again.to_dict() == result.to_dict()
    assert repr(again) == repr(result)
    again.save(path)  # a file of its own kind is replaced
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(hs.HeadspanError, match="choose another name"):
        result.save(other)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("name", RESULTS)
def test_texts_are_short_and_names_are_escaped(name: str, made: Callable[[str], Any]) -> None:
    lines = repr(made(name)).splitlines()
    assert 1 <= len(lines) <= 12 and max(map(len, lines)) <= 120
    shown = made(name)._repr_html_()
    assert shown is None or (isinstance(shown, str) and HOSTILE not in shown and "<b onclick" not in shown)


def test_a_name_in_a_table_is_escaped(made: Callable[[str], Any]) -> None:
    for name in ("nodes", "around node", "reproduce", "Scores matrix", "Circuit"):
        text = Tabular._repr_html_(made(name))
        assert text is not None and "&lt;b onclick=" in text and "<b onclick" not in text


@pytest.mark.parametrize("name", RESULTS)
def test_equality_sees_a_difference(name: str, made: Callable[[str], Any], tmp_path: Path) -> None:
    result = made(name)
    assert result != object() and result != made("info" if name != "info" else "tokens")


# ------------------------------------------------------------------------------------------- untrusted files

SEALED = sorted({name for name in RESULTS if name not in ("behaviour", "Circuit")})


def edit(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any], reseal: bool = True) -> Path:
    head, arrays = read_sealed(path, "result", "missing")
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(head, arrays)
    if reseal:
        head[HASH] = content_hash(arrays, head)
    save_file(arrays, path, {"headspan": json.dumps(head)})
    return path


@pytest.mark.parametrize("name", SEALED)
def test_an_edited_file_is_reported_and_stays_reported(name: str, made: Callable[[str], Any], tmp_path: Path) -> None:
    path = edit(saved(made(name), tmp_path), lambda head, arrays: head.update(comment="x"), reseal=False)
    with pytest.warns(hs.HeadspanWarning, match="hash does not match"):
        again = hs.load(path)
    again.save(path)
    with pytest.warns(hs.HeadspanWarning, match="had been edited"):
        hs.load(path)


@pytest.mark.parametrize("name", SEALED)
def test_other_kinds_newer_versions_and_torn_files_are_one_sentence(
    name: str, made: Callable[[str], Any], tmp_path: Path
) -> None:
    path = saved(made(name), tmp_path)
    whole = path.read_bytes()
    for change, sentence in {
        (("kind", "spell"),): "'spell', which this version cannot read",
        (("kind", 3),): "cannot read",
        (("schema", 99),): "newer",
        (("schema", "2"),): "make it again|Make it again|newer version",
    }.items():
        path.write_bytes(whole)
        edit(path, lambda head, arrays, change=change: head.update(change))
        with pytest.raises(hs.HeadspanError, match=sentence):
            hs.load(path)
    for length in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(hs.HeadspanError, match="make it again"):
            hs.load(path)


def test_one_class_refuses_the_file_of_another(made: Callable[[str], Any], tmp_path: Path) -> None:
    path = saved(made("hubs"), tmp_path)
    with pytest.raises(hs.HeadspanError, match="'hubs', not the scores"):
        hs.Scores.load(path)
    with pytest.raises(hs.HeadspanError, match=r"'hubs', not .*'series'"):
        hs.Series.load(path)
    with pytest.raises(hs.HeadspanError, match="'hubs', not"):
        hs.Effects.load(path)


JUNK: tuple[Any, ...] = (None, 3, -1, 1e400, "L0H0", HOSTILE, [], {}, [[]], {"array": "gone"}, [None] * 3, {"a": 1})


@pytest.mark.parametrize("name", SEALED)
def test_a_wrong_value_is_refused_or_harmless(name: str, made: Callable[[str], Any], tmp_path: Path) -> None:
    """Any one value of a file replaced, sealed again: one sentence, or a result that can be shown and listed."""
    path = saved(made(name), tmp_path)
    whole = path.read_bytes()
    head, arrays = read_sealed(path, "result", "missing")
    rng = np.random.default_rng(len(name))
    places = [place for place in walk(head) if place[0] not in ("kind", "schema", HASH)]
    refused = 0
    for number in rng.permutation(len(places))[:60]:
        path.write_bytes(whole)
        junk = JUNK[int(rng.integers(len(JUNK)))]
        edit(path, lambda head, arrays, at=places[number], junk=junk: put(head, at, junk))
        refused += harmless(path) is None
    for array in arrays:
        path.write_bytes(whole)
        edit(path, lambda head, arrays, array=array: arrays.update({array: arrays[array].ravel()[:1]}))
        refused += harmless(path) is None
        path.write_bytes(whole)
        edit(path, lambda head, arrays, array=array: arrays.pop(array))
        refused += harmless(path) is None
    assert refused


def harmless(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = hs.load(path)
    except hs.HeadspanError as error:
        sentence = str(error)
    else:
        sentence = ""
    assert len(sentence) < 600 and "\n" not in sentence
    if sentence:
        return None
    repr(result), result._repr_html_(), result.rows(), json.dumps(result.to_dict(), allow_nan=False)
    return result


def walk(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from walk(part, (*place, key))


def put(value: Any, place: tuple[Any, ...], junk: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = junk


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": 3}', "[" * 10**5, '{"identity": {"L0H0": 7}}', "\ufeff{}", '{"kind": "hubs"}']
)
def test_json_that_is_no_result(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(hs.HeadspanError) as caught:
        hs.load(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- the rest


def test_nodes_of_a_result_are_nodes(scores: hs.Scores, tmp_path: Path) -> None:
    scores.save(tmp_path / "r.safetensors")
    for found in (scores, hs.load(tmp_path / "r.safetensors")):
        (one,) = found.ports.nodes
        assert isinstance(one, hs.Node) and one.name == HOSTILE and one.reads and one.writes and one.basis is None
    with pytest.raises(hs.HeadspanError, match="has no basis"):
        hs.nodes("demo", one)


def test_old_names_work_for_one_version() -> None:
    with pytest.warns(DeprecationWarning, match=r"headspan\.HeadRole is now headspan\.Port"):
        assert hs.HeadRole is hs.Port


def test_loading_scores_imports_only_what_results_need(scores: hs.Scores, tmp_path: Path) -> None:
    scores.save(tmp_path / "r.safetensors")
    script = (
        "import sys, headspan as hs; hs.load(sys.argv[1])\nprint([n for n in sys.modules if n.startswith('headspan.')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "r.safetensors")], capture_output=True, text=True, check=True
    )
    folders = {name.split(".")[1] for name in eval(told.stdout)}
    assert folders <= {"vocabulary", "system", "subspaces", "results"}


def test_annotations_of_results_can_be_resolved() -> None:
    from headspan.results.plain_values import members

    for where in saving.KINDS.values():
        cls = saving.class_of(where)
        assert hasattr(cls, "_from_parts") or members(cls), inspect.getfile(cls)
