"""Task circuits and examples of edges in a report, in a real browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headspan as hs
from headspan.cli import app
from headspan.explorer.demo_measurements import shipped_tasks, with_shipped
from headspan.explorer.report import report
from headspan.explorer.tasks import MOST_EDGES, encode_task
from headspan.explorer.watch import example_sets
from headspan.results.effects import attach, effects_of
from headspan.results.tasks.edge_table import EdgeTable
from headspan.results.tasks.examples import PER_PAIRING, Examples, Watched
from headspan.results.tasks.task_result import on_edges
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import FLOW_PAIRINGS, Head, Pairing, Role
from report_browser import Open, View, violations
from report_models import HOSTILE, synthetic_scores

OK, OV = Pairing.parse("OK"), Pairing.parse("OV")


@pytest.fixture(scope="module")
def task(demo: tuple[Path, hs.Scores]) -> hs.Task:
    (found,) = shipped_tasks(demo[1])
    return found


def examples_of(result: Any) -> Examples:
    assert result.examples is not None
    return result.examples


# ------------------------------------------------------------------- an edge to watch


def moved(view: View) -> tuple[int, float]:
    """The token of the card and the number that the card says about it."""
    hint = view.drawn().locator("#inspector [data-moved]")
    return int(hint.get_attribute("data-query") or -1), float(hint.get_attribute("data-moved") or "nan")


def test_an_edge_can_be_watched(open_page: Open, demo: tuple[Path, hs.Scores], task: hs.Task) -> None:
    path, scores = demo
    examples = examples_of(task)
    source, target = Head(0, 3), Head(1, 0)
    before, after = examples.rows(OK, source, target)
    variation = np.abs(before - after).sum(1) / 2
    view = open_page(path, scores, "#pair=L0H3.O-L1H0.K")
    page = view.page
    tokens = page.eval_on_selector_all(".watch [role=radio]", "all => all.map(e => e.textContent)")
    assert tokens == examples.tokens and "task induction" in view.text("#inspector")
    query = int(variation.argmax())
    assert moved(view) == (query, pytest.approx(variation[query], abs=1e-4))
    checked = page.locator('.watch [aria-checked="true"]')
    assert checked.count() == 1 and checked.get_attribute("data-token") == str(query)
    key = int(np.abs(before - after)[query].argmax())
    assert f"{before[query, key]:.2f} → {after[query, key]:.2f}" in view.text(".watch-bars")
    shown = page.evaluate("([q]) => HS.watch.find('OK', 'L0H3', 'L1H0').after(q)", [query])
    np.testing.assert_allclose(np.array(shown[: query + 1]), after[query, : query + 1], atol=1e-5)
    # Another token with the mouse, then with the keyboard; the address keeps it.
    page.click('.watch [data-token="14"]')
    assert moved(view) == (14, pytest.approx(variation[14], abs=1e-4)) and "token=14" in view.fragment()
    page.keyboard.press("ArrowRight")
    assert moved(view)[0] == 15 and page.evaluate("document.activeElement.dataset.token") == "15"
    page.keyboard.press("Home")
    assert moved(view)[0] == 0
    values = next(edge for edge in examples.edges if edge.pairing == OV)
    page.evaluate(f"HS.choosePair('OV', '{values.source}', '{values.target}')")
    assert view.state("token") == "" and "Attention stays as it is" in view.text(".watch")
    changes = examples.changes(values.source, values.target)
    assert moved(view) == (int(changes.argmax()), pytest.approx(float(changes.max()), rel=1e-6))
    assert not view.errors


def test_examples_of_effects_are_shown_where_a_task_has_none(
    open_page: Open, demo: tuple[Path, hs.Scores], task: hs.Task
) -> None:
    path, scores = demo
    own = {edge[:3] for edge in examples_of(task).edges}
    measured = examples_of(effects_of(with_shipped(scores)))
    edge = next(edge for edge in measured.edges if edge.pairing == OK and edge[:3] not in own)
    before, after = measured.rows(*edge[:3])
    view = open_page(path, scores, f"#pair={edge.source}.O-{edge.target}.K&token=20")
    assert "beginning of the text" in view.text("#inspector") and "another sequence" in view.text("#inspector")
    assert moved(view) == (20, pytest.approx(np.abs(before - after)[20].sum() / 2, abs=1e-4))
    known = own | {edge[:3] for edge in measured.edges}
    heads = [(Head(0, i), Head(1, j)) for i in range(8) for j in range(8)]
    source, target = next(pair for pair in heads if (OK, *pair) not in known)
    view.page.evaluate(f"HS.choosePair('OK', '{source}', '{target}')")
    assert f"the {PER_PAIRING} best OK edges only" in view.text("#inspector")


def test_tokens_are_text_and_shared_heads_are_named(open_page: Open, tmp_path: Path) -> None:
    """Hostile tokens stay text; under shared keys the query head that is shown is named; not causal."""
    scores = hs.score(tiny(kv_heads=2))
    head = Head(1, 3)
    patterns = np.full((1, 9), 1 / 3, np.float16)
    examples = Examples(
        [HOSTILE[:40], "\t", "=1+1"], "text", [Watched(OK, Head(0, 1), scores.heads("K")[3], head)], patterns,
        np.array([[1, 0, 0, 0, 1, 0, 0, 0, 1]], np.float16), np.zeros((0, 3), np.float32),
    )  # fmt: skip
    attach(scores, replace(no_effects(scores), examples=examples))
    report(scores, out=tmp_path / "page.html")
    view = open_page(tmp_path / "page.html", scores, "#pair=L0H1.O-L1KV1.K")
    tokens = view.page.eval_on_selector_all(".watch [role=radio]", "all => all.map(e => e.textContent)")
    assert tokens == examples.tokens and view.page.locator(".watch img").count() == 0
    assert "Of the heads that use L1KV1, L1H3 changes most and is shown" in view.text("#inspector")
    assert moved(view)[1] == pytest.approx(2 / 3, abs=1e-3) and not view.errors


def tiny(kv_heads: int) -> Any:
    rng = np.random.default_rng(1)
    counts = {"Q": 4, "K": kv_heads, "V": kv_heads, "O": 4}
    return hs.open({role: rng.standard_normal((2, n, 24, 4)) for role, n in counts.items()})


def no_effects(scores: hs.Scores) -> hs.Effects:
    """Effects of zero on every OK edge."""
    table = scores.ports
    values = np.where(np.isnan(scores["pk", "OK"].forward().values), np.nan, 0).astype(np.float32)
    return hs.Effects(table, {("text", OK): values}, {}, np.ones(len(table.query), np.float32))


def test_a_page_without_examples_does_not_speak_of_them(open_page: Open, tmp_path: Path) -> None:
    scores = hs.score(tiny(kv_heads=4))
    payload = report(scores, out=tmp_path / "page.html").payload
    assert payload["examples"] == payload["tasks"] == []
    view = open_page(tmp_path / "page.html", scores, "#pair=L0H1.O-L1H2.K&at=task&edges=7&task=9")
    assert "Watch" not in view.text("#inspector") and not view.page.is_visible("#task")
    assert view.state("at") == "" and view.state("task") == "1" and "Task" not in view.text("#nav")


def test_examples_are_small() -> None:
    """The most that a page may hold: 33 tokens, 20 edges of each pairing, each into another head."""
    n, cells = 33, 33 * 17
    edges = [
        Watched(p, Head(0, i), Head(1 + i, j), Head(1 + i, j)) for j, p in enumerate(FLOW_PAIRINGS) for i in range(20)
    ]
    rng = np.random.default_rng(0)
    before, after = (rng.random((40, cells)).astype(np.float16) for _ in range(2))
    examples = Examples(["token"] * n, "text", edges, before, after, rng.random((20, n)).astype(np.float32))
    effects = replace(no_effects(hs.score(tiny(kv_heads=4))), examples=examples)
    assert len(json.dumps(example_sets(effects, []))) < 150_000


# ------------------------------------------------------------------- task circuits


def test_the_numbers_of_a_task_are_those_of_its_file(demo: tuple[Path, hs.Scores], task: hs.Task) -> None:
    content = json.loads(json.dumps(encode_task(task, demo[1])))
    rows = replace(task, k=task.table.n_edges).rows()
    assert content["edges"] == [[row["source"], row["target"]] for row in rows][:MOST_EDGES]
    assert (content["n_edges"], content["circuit"], content["largest"]) == (310, 24, True)
    assert content["curve"] == [[p["edges"], p["faithfulness"]] for p in task.curve]
    assert (content["faithfulness"], content["cpr"], content["cmd"]) == (task.faithfulness, task.cpr, task.cmd)


def test_a_task_has_a_tab(open_page: Open, demo: tuple[Path, hs.Scores], task: hs.Task) -> None:
    path, scores = demo
    view = open_page(path, scores, "#at=task")
    page = view.page
    assert view.shows("#task-status", "24 of 310 edges: faithfulness 0.81 on 48 held-out prompts.")
    rows = {(row["source"], row["target"]): row for row in replace(task, k=310).rows()}
    shown = {(row["from"], row["to"]): row for row in view.saved_csv('[data-csv="task-induction"]')}
    assert list(shown) == list(rows)[:24]
    for ends, row in shown.items():
        for column, name in (("attribution", "attribution"), ("exact", "exact"), ("frequency", "frequency"),
                             ("pk", "pk"), ("pk_rank", "pk_rank"), ("influence", "influence")):  # fmt: skip
            expected = rows[ends][name]
            assert (float(row[column]) if row[column] else None) == expected, (ends, column)
    drawn = page.eval_on_selector_all("#task-diagram .edge-hit", "all => all.map(e => e.dataset.pair)")
    assert sorted(drawn) == sorted("-".join(ends) for ends in shown)
    points = page.eval_on_selector_all(
        ".task-curve circle", "all => all.map(e => [Number(e.dataset.edges), Number(e.dataset.faithfulness)])"
    )
    curve = {p["edges"]: p["faithfulness"] for p in task.curve} | {24: task.faithfulness}
    assert dict(points) == curve
    # The slider with the keyboard; circuits between measured points are not given a number.
    page.focus("#control-edges")
    page.keyboard.press("ArrowRight")
    assert view.state("edges") == "25" and view.shows("#task-status", "25 of 310 edges: not measured at this size")
    assert f"{curve[24]:.2f} with 24, {curve[31]:.2f} with 31 edges" in view.text("#task-status")
    page.keyboard.press("End")
    assert view.shows("#task-status", "310 of 310 edges: faithfulness 1 ")
    assert "Drawn: the best 120 of these 310 edges" in view.text("#task-legend")
    page.keyboard.press("Home")
    assert view.shows("#task-status", "1 of 310 edges") and view.page.is_disabled("#task-wire")
    assert not view.errors


def test_a_circuit_is_shown_in_the_wiring(open_page: Open, demo: tuple[Path, hs.Scores], task: hs.Task) -> None:
    path, scores = demo
    view = open_page(path, scores, "#at=task&edges=30")
    page = view.page
    steps = page.evaluate("history.length")
    assert view.shows("#task-wire", "edges between heads")
    page.click("#task-wire")
    best = [
        task.table.edge(*divmod(int(p), len(task.table.readers))) for p in task.table.strongest(task.attribution, 30)
    ]
    between = {f"{source}-{target}" for source, target in best if source[-1] == "O" and target[-1] in "QKV"}
    assert view.drawn() and view.edges() == between == set(view.state("pins").split("|"))
    assert view.state("circuit") == "induction" and page.evaluate("history.length") == steps + 1
    page.click("#task-table td:nth-child(4) button.link")
    assert view.state("pair") in between


def test_several_tasks_and_given_circuits(
    open_page: Open, demo: tuple[Path, hs.Scores], task: hs.Task, tmp_path: Path
) -> None:
    """Two tasks of one name, one whose circuit was given, without a curve and from no method."""
    _, scores = demo
    odd = np.zeros_like(task.edges_kept)
    odd.ravel()[task.table.strongest(task.attribution, 310)[[0, 5, 200]]] = True
    other = replace(task, circuit=odd, curve=[], protocol={}, faithfulness=0.5)
    task.save(tmp_path / "one.safetensors")
    page = report(scores, out=tmp_path / "page.html", task=[tmp_path / "one.safetensors", other])
    assert [one["largest"] for one in page.payload["tasks"]] == [True, False]
    view = open_page(tmp_path / "page.html", scores, "#at=task&edges=5")
    view.page.select_option("#control-task", "2")
    assert view.shows("#task-about", "The circuit of this task was given: 3 edges, faithfulness 0.50; 3 of them")
    assert view.shows("#task-status", "40 of 310 edges. The faithfulness of circuits was not measured.")
    names = view.page.eval_on_selector_all("#control-task option", "all => all.map(e => e.textContent)")
    assert names == ["induction (EAP-IG)", "induction (2)"]
    assert view.page.locator(".task-curve").count() == 0 and "In circuit" in view.text("#task-table")


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (420, "dark")])
def test_axe_finds_nothing(width: int, scheme: str, open_page: Open, axe: str, demo: tuple[Path, hs.Scores]) -> None:
    options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "bypass_csp": True}
    view = open_page(*demo, "#at=task&edges=300&pair=L0H2.O-L1H6.V", **options)
    assert violations(view.page, axe) == []
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_task_of_a_large_model_stays_small() -> None:
    """24 layers of 16 heads with 4 key/value heads: 100,000 edges, of which 400 are in the page."""
    scores = synthetic_scores(24, 16)
    table = EdgeTable.regular(24, 16, 16)
    values = np.random.default_rng(0).standard_normal(table.mask.shape).astype(np.float32)
    nothing = np.zeros_like(values)
    made = hs.Task(
        "ioi", scores.ports, [f"L{i}MLP" for i in range(24)], False, values, nothing, nothing, 40,
        {"prompts": 8, "clean": 1.0, "corrupted": 0.0, "solved": 1.0}, circuit=table.circuit(values, 5000),
    )  # fmt: skip
    assert table.n_edges > 100_000
    content = encode_task(made, scores)
    assert len(content["edges"]) == MOST_EDGES and len(json.dumps(content)) < 60_000
    overlap = on_edges(scores, "pk", table)["pk"]
    for (source, target), place in zip(content["edges"][:50], table.strongest(values, 50), strict=True):
        row, column = table.place(source, target)
        assert row * len(table.readers) + column == place
        assert np.isnan(overlap[row, column]) != table.between_heads[row, column]


# ------------------------------------------------------------------- commands


def test_a_task_of_another_model_is_refused(task: hs.Task, tmp_path: Path) -> None:
    with pytest.raises(HeadspanError, match="another model"):
        report(hs.score(tiny(kv_heads=4)), task=task)
    hs.score("demo", "pk", "OK", out=tmp_path / "r.safetensors")
    with pytest.raises(HeadspanError, match="not a result of the kind 'task'"):
        report("demo", task=tmp_path / "r.safetensors")


def test_the_command(task: hs.Task, tmp_path: Path) -> None:
    task.save(tmp_path / "task.safetensors")
    out = tmp_path / "page.html"
    arguments = ["report", "demo", "--tokens", "0", "--task", str(tmp_path / "task.safetensors")]
    run = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert run.exit_code == 0 and '"name":"induction"' in out.read_text(encoding="utf-8")
    run = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "task.safetensors"), "--force"])
    assert "it is one of the input files" in str(run.exception)


def test_the_shipped_task_is_that_of_the_model(task: hs.Task) -> None:
    """Estimates on the same prompts, measured again."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    again = hs.task("demo", "induction", verify=False)
    assert again.protocol["sha256"] == task.protocol["sha256"] and again.values == pytest.approx(task.values, rel=1e-3)
    np.testing.assert_allclose(again.attribution, task.attribution, atol=2e-3)
    np.testing.assert_allclose(again.frequency, task.frequency, atol=0.05)
    assert [e[:3] for e in examples_of(again).edges] == [e[:3] for e in examples_of(task).edges]
    target = examples_of(task).edges[0].target
    assert target.layer == 1 and not any(edge.pairing.target is Role.R for edge in examples_of(task).edges)
