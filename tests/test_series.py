"""A series of checkpoints: measurements are right, stopped runs continue, downloads are removed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import headspan as hs
from headspan.change import track as tracking
from headspan.change.series import half_time
from headspan.checkpoints.hub.revisions import find_checkpoints, natural, step_number
from headspan.cli import _run, app
from headspan.results.tabular import same_content
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Role
from series_hub import REPO, SeriesHub, checkpoint, run, served, write

STEPS = (0, 1, 2, 4, 8)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / "run" / f"step{step}", step) for step in STEPS]


@pytest.fixture
def hub() -> Any:
    with served({"main": checkpoint(8.5)} | {f"step{step}": checkpoint(step) for step in STEPS}) as server:
        yield server


def files_in(home: Path) -> set[str]:
    """What is kept of models of hubs other than the default one."""
    folder = home / "endpoints"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def test_every_number_is_that_of_its_own_comparison(folders: list[Path], tmp_path: Path, cache: Path) -> None:
    series = hs.track(folders, tmp_path / "run.safetensors", k=3)
    assert [step.step for step in series.steps] == list(STEPS)
    all_scores = [hs.score(hs.open(folder), "pk", "flow") for folder in folders]
    for row, scores in enumerate(all_scores):
        for column, edge in enumerate(series.edges):
            matrix = scores["pk", edge.pairing]
            assert series.scores[row, column] == pytest.approx(matrix.at(edge.source, edge.target), abs=1e-5)
            assert series.ranks[row, column] == matrix.forward().rank_of(edge.source, edge.target)
        for pairing in ("OQ", "OK", "OV"):
            tops = {(pairing, e.source, e.target) for e in scores["pk", pairing].top(3)}
            assert tops <= {(str(e.pairing), e.source, e.target) for e in series.edges}
            found = hs.hubs(scores, pairing)
            expected = found.inlet.values, found.outlet.values
            parsed = hs.Pairing.parse(pairing)
            for hub, values in zip(("inlet", "outlet"), expected, strict=True):
                assert np.allclose(series.hubs[hub, parsed][row], values, atol=1e-4, equal_nan=True)
    for row, folder in enumerate(folders):
        for name, arrays, other in (
            ("previous", series.from_previous, folders[row - 1]), ("last", series.from_last, folders[-1])
        ):  # fmt: skip
            if name == "previous" and row == 0:
                assert all(np.isnan(arrays[role][0]).all() for role in ROLES)
                continue
            drift = hs.diff(other, folder).drift
            for role in ROLES:
                expected = [line.drift for line in drift if line.role is role]
                assert arrays[role][row] == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert not list((cache / "unfinished").iterdir())


def test_trajectories() -> None:
    def model(share: float) -> dict[str, np.ndarray]:
        """The keys of L1H0 turn, step by step, into what L0H1 writes."""
        random = np.random.default_rng(3)
        arrays = {role: random.normal(size=(2, 3, 32, 4)) for role in "QKVO"}
        arrays["K"][1, 0] = (1 - share) * arrays["K"][1, 0] + share * arrays["O"][0, 1]
        return arrays

    shares = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
    series = hs.track([model(share) for share in shares], k=1)
    line = next(t for t in series.trajectories() if str(t.edge) == "L0H1 → L1H0 (OK)")
    pk = series.of("L0H1", "L1H0", "OK")
    assert line.final == pytest.approx(4, abs=1e-4) and line.rank == 1
    assert line.growth == pytest.approx(pk[-1] - pk[0], abs=1e-5)
    best = np.array([hs.score(hs.open(model(s)), "pk", "OK")["pk", "OK"].top(1)[0].score for s in shares])
    assert line.birth == int(np.argmax(pk >= best - 1e-5))
    middle = (pk[0] + pk[-1]) / 2
    assert pk[math.floor(line.half)] <= middle <= pk[math.ceil(line.half)]
    moved = series.from_previous[Role.K][1:]
    assert (moved[:, 3] > 1e-4).all() and np.delete(moved, 3, axis=1).max() < 1e-12
    assert (np.diff(series.from_last[Role.K][:, 3]) < 0).all()
    assert half_time(np.array([0, 4, 8]), np.array([0.0, 1.0, 4.0])) == pytest.approx(4 + 4 / 3)
    assert math.isnan(half_time(np.array([0, 1]), np.array([1.0, 1.0])))


def test_the_edges_that_grew_most_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    steps = [{role: rng.normal(size=(3, 2, 24, 4)) for role in "QKVO"} for _ in range(3)]
    series = hs.track([hs.open(step) for step in steps], k=4)
    growths = [row["growth"] for row in series.rows()]
    assert growths == sorted(growths, reverse=True) and len({row["pairing"] for row in series.rows()[:8]}) > 1
    series.save(tmp_path / "run.safetensors")
    assert _run(["track", str(tmp_path / "run.safetensors"), "--json"]) == 0
    assert [row["growth"] for row in json.loads(capsys.readouterr().out)] == pytest.approx(growths)


def test_half_time_of_an_edge_that_overshoots_is_the_first_crossing() -> None:
    numbers = np.array([0, 10, 20, 30])
    assert half_time(numbers, np.array([0.0, 8.0, 1.0, 4.0])) == pytest.approx(2.5)  # 2 of 8 on the way up, not later
    assert half_time(numbers, np.array([0.0, -4.0, 0.0, 2.0])) == pytest.approx(25)
    assert half_time(numbers, np.array([0.0, np.nan, 4.0, 2.0])) == pytest.approx(5)


def test_the_command_prints_its_table_without_a_file(folders: list[Path], tmp_path: Path) -> None:
    inside = set(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["track", *map(str, folders), "-k", "3", "--json"])
    assert result.exit_code == 0 and "nothing is saved" in result.stderr
    assert set(tmp_path.rglob("*")) == inside
    kept = CliRunner().invoke(
        app, ["track", *map(str, folders), "-k", "3", "--json", "--out", str(tmp_path / "run.safetensors")]
    )
    assert json.loads(result.stdout) == json.loads(kept.stdout) and len(json.loads(kept.stdout)) >= 9


def test_file_and_records(folders: list[Path], tmp_path: Path) -> None:
    series = hs.track(folders, tmp_path / "run.safetensors", k=2, fold=True)
    again = hs.Series.load(tmp_path / "run.safetensors")
    assert again.folding == "folded" and again.steps == series.steps and again.edges == series.edges
    assert np.allclose(again.scores, series.scores) and np.allclose(again.from_last[Role.O], series.from_last[Role.O])
    rows = series.rows("all")
    assert {row["table"] for row in rows} == {"trajectory", "edge", "drift", "hub"}
    assert len({tuple(row) for row in rows}) == 1
    assert len(series.to_pandas("drift")) == len(STEPS) * 4 * 6
    assert hs.track(tmp_path / "run.safetensors").edges == series.edges  # a finished series, as the command takes it
    assert repr(series).startswith("Series of 5 steps") and "<th>half</th>" in series._repr_html_()
    with pytest.raises(HeadspanError, match=r"L0H0 → L0H1 \(OK\)"):
        series.of("L0H0", "L0H1", "OK")
    assert hs.load(tmp_path / "run.safetensors") == series
    with pytest.raises(HeadspanError, match="'series', not the scores"):
        hs.Scores.load(tmp_path / "run.safetensors")
    with pytest.warns(DeprecationWarning, match=r"Series\.records is now Series\.rows"):
        assert same_content(series.records(), rows)


@pytest.mark.parametrize("damage", ["junk", "scores", "other", "shape", "newer"])
def test_damaged_files_are_one_message(damage: str, folders: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    hs.track(folders[:2], path, k=1)
    if damage == "junk":
        path.write_bytes(b"x" * 50)
    elif damage == "scores":
        hs.score(hs.open("demo"), "pk", "OK", out=path, force=True)
    elif damage == "other":
        save_file({"x": np.ones(1)}, path)
    else:
        tensors = load_file(path)
        head = {"schema": 1, "kind": "series", "k": 1, "folding": "none", "notes": [], "provenance": {}}
        head |= {"steps": [[0, "a", "b"]], "edges": [], "heads": {r.value: ["L0H0"] for r in ROLES}}
        save_file(tensors, path, {"headspan": json.dumps(head | {"schema": 9} if damage == "newer" else head)})
    with pytest.raises(HeadspanError) as caught:
        hs.Series.load(path)
    assert "\n" not in str(caught.value)


def test_head_scores(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folders = [write(tmp_path / f"step{step}", step) for step in (0, 8)]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"n_positions": 256, "n_inner": 1}))
        from safetensors.numpy import load_file

        tensors = load_file(folder / "model.safetensors")
        tensors["wpe.weight"] = np.random.default_rng(0).normal(size=(256, 24)).astype(np.float32)
        for layer in range(3):
            tensors |= {
                f"h.{layer}.mlp.c_fc.weight": np.zeros((24, 1), np.float32),
                f"h.{layer}.mlp.c_fc.bias": np.zeros(1, np.float32),
                f"h.{layer}.mlp.c_proj.weight": np.zeros((1, 24), np.float32),
                f"h.{layer}.mlp.c_proj.bias": np.zeros(24, np.float32),
                f"h.{layer}.ln_2.weight": np.ones(24, np.float32),
                f"h.{layer}.ln_2.bias": np.zeros(24, np.float32),
            }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    series = hs.track(folders, run=True)
    expected = hs.behaviour(folders[1])
    assert series.head_scores["induction"][1] == pytest.approx(expected.arrays["induction"], abs=1e-6)
    assert not np.allclose(series.head_scores["induction"][0], expected.arrays["induction"], atol=1e-3)
    assert "head" in {row["table"] for row in series.rows("all")}


# -- which checkpoints -----------------------------------------------------------------------------------------


def test_names_and_order() -> None:
    assert sorted(["step10", "step9", "step100", "step9b"], key=natural) == ["step9", "step9b", "step10", "step100"]
    assert [step_number(n) for n in ("a/b@step64", "checkpoint-7", "iter_0010", "x2/epoch3", "main")] == [
        64,
        7,
        10,
        3,
        None,
    ]


def test_local_patterns_steps_and_last(folders: list[Path]) -> None:
    pattern = str(folders[0].parent / "step*")
    assert [c.step for c in find_checkpoints(pattern)] == list(STEPS)
    assert [c.step for c in find_checkpoints([pattern], steps=[4, 0])] == [4, 0]
    assert [c.step for c in find_checkpoints(pattern, last=2)] == [4, 8]
    assert [c.step for c in find_checkpoints([folders[2], "demo"])] == [0, 1]  # not all have numbers: counted


@pytest.mark.parametrize(
    ("refs", "options", "sentence"),
    [
        ("{run}/step*", {"steps": [0, 3]}, "5 (0, 1, 2, 4, 8)"),
        ("{run}/step*", {"steps": [0], "last": 3}, "not both"),
        ("{run}/step*", {"last": 1}, "at least two checkpoints"),
        ("{run}/epoch*", {}, "no file or directory matches"),
        ("{run}/step0", {}, "two checkpoints, but there is 1"),
        (["{run}/step0", "{run}/step0"], {}, "is given twice"),
        (["{run}/step0", "{run}/nothing/here/at/all"], {}, "no such file or directory"),
        ("{run}/step*", {"k": 0}, "k is 0"),
        ("{run}/step*", {"k": "many"}, "whole number, not 'many'"),
        ("{run}/step*", {"steps": "0,1"}, "steps must be"),
        (["{run}/step0", "demo"], {}, "step0 has d_model 24, not 256"),
    ],
)
def test_refusals(refs: Any, options: dict[str, Any], sentence: str, folders: list[Path], tmp_path: Path) -> None:
    home = str(folders[0].parent)
    given = [ref.replace("{run}", home) for ref in refs] if isinstance(refs, list) else refs.replace("{run}", home)
    with pytest.raises(HeadspanError) as caught:
        hs.track(given, tmp_path / "run.safetensors", **options)
    assert sentence in str(caught.value) and "to continue" not in str(caught.value)  # it would end here again
    assert not (tmp_path / "run.safetensors").exists()


def test_equal_checkpoints_under_two_names(folders: list[Path], tmp_path: Path) -> None:
    copy = write(tmp_path / "run" / "step9", 2)
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")  # other bytes, the same weights
    with pytest.raises(HeadspanError) as caught:
        hs.track([*folders, copy], tmp_path / "run.safetensors")
    assert str(folders[2]) in str(caught.value) and str(copy) in str(caught.value)
    assert "`allow_duplicates=True`" in str(caught.value) and "to continue" not in str(caught.value)
    series = hs.track([*folders, copy], tmp_path / "run.safetensors", allow_duplicates=True)
    assert len(series.steps) == 6 and any("two names" in note for note in series.notes)
    assert series.from_last[Role.Q][2].max() < 1e-12


# -- going on --------------------------------------------------------------------------------------------------


def test_large_models_keep_the_strongest_edges(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hs.track(folders, k=2)
    monkeypatch.setattr(tracking, "ALL_SCORES", 0)
    monkeypatch.setattr(tracking, "SOME_SCORES", 1)
    part = hs.track(folders, k=2)
    assert part.edges == whole.edges
    known = ~np.isnan(part.scores)
    assert np.allclose(part.scores[known], whole.scores[known]) and not known.all()
    strongest = [i for i in range(len(part.edges)) if 0 < whole.ranks[-1, i] <= 2]
    assert known[:, strongest].all()  # the edges of the last step are known from the first on


def test_a_killed_run_continues_where_it_stopped(hub: SeriesHub, tmp_path: Path, cache: Path) -> None:
    out, home = tmp_path / "run.safetensors", tmp_path / "home"
    killed = run(
        f"told('{REPO}@step*', r'{out}', k=2, progress=lambda done, total: done == 3 and os.kill(os.getpid(), 9))",
        home, hub.address,
    )  # fmt: skip
    assert killed.returncode == -9 and not out.exists()
    assert sorted({r for r, name in hub.downloaded if name == "model.safetensors"}) == ["step0", "step1", "step8"]
    hub.downloaded.clear()
    logged = "import logging; logging.basicConfig(level=logging.INFO)\n"
    again = run(logged + f"told('{REPO}@step*', r'{out}', k=2)", home, hub.address)
    assert "continuing an unfinished series: 3 of 5" in again.stderr
    assert sorted({r for r, name in hub.downloaded if name == "model.safetensors"}) == ["step2", "step4"]
    straight = hs.track([write(tmp_path / f"step{step}", step) for step in STEPS], k=2)
    series = hs.Series.load(out)
    assert np.allclose(series.scores, straight.scores, atol=1e-6)
    assert all(np.allclose(series.from_previous[r], straight.from_previous[r], equal_nan=True) for r in ROLES)
    assert not list((cache / "unfinished").iterdir())


def test_a_network_failure_halfway(hub: SeriesHub, tmp_path: Path) -> None:
    out, home = tmp_path / "run.safetensors", tmp_path / "home"
    hub.broken.add("step2")
    code = f"told('{REPO}@step*', r'{out}', k=2)"
    failed = run(code, home, hub.address)
    assert failed.stdout.startswith("refused:") and "step2" in failed.stdout, failed.stderr
    assert "(3 of 5 steps are kept" in failed.stdout
    assert failed.stdout.count("\n") == 1
    assert not files_in(home)
    hub.broken.clear()
    hub.downloaded.clear()
    done = run(code, home, hub.address)
    assert done.stdout.startswith("Series of 5 steps"), done.stdout + done.stderr
    assert sorted({r for r, name in hub.downloaded if name == "model.safetensors"}) == ["step2", "step4"]


def test_without_a_network_the_cache_is_asked(hub: SeriesHub, tmp_path: Path) -> None:
    out, home = tmp_path / "run.safetensors", tmp_path / "home"
    assert "Series of 5" in run(f"told('{REPO}@step*', r'{out}', keep=True)", home, hub.address).stdout
    before = files_in(home)
    out.unlink()
    offline = run(f"told('{REPO}@step*', r'{out}')", home, hub.address, HF_HUB_OFFLINE="1")
    assert offline.stdout.startswith("Series of 5 steps"), offline.stdout + offline.stderr
    assert files_in(home) == before
    nothing = run(f"told('{REPO}@step*', r'{out}')", tmp_path / "empty", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert all(fact in nothing.stdout for fact in ("refused:", "someone/series", "'step*'"))


def test_a_damaged_shelf_is_made_again(folders: list[Path], tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "run.safetensors"

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hs.track(folders, out, k=2, progress=stop)
    kept = sorted(path.name for path in (cache / "unfinished").rglob("*.safetensors"))
    assert sum(name.startswith("step-") for name in kept) == 3
    assert {name.partition("-")[2] for name in kept if name.startswith("bases")} == {"1.safetensors", "4.safetensors"}
    for path in (cache / "unfinished").rglob("bases_k1-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    series, straight = hs.track(folders, out, k=2), hs.track(folders, k=2)
    assert all(np.allclose(series.from_previous[r], straight.from_previous[r], equal_nan=True) for r in ROLES)


def test_inputs_are_never_written_over(folders: list[Path]) -> None:
    for out in (folders[0] / "model.safetensors", folders[2] / "model-2.safetensors"):
        with pytest.raises(HeadspanError, match="cannot write"):
            hs.track(folders, out)
    assert len(hs.track(folders).steps) == 5


# -- the hub ---------------------------------------------------------------------------------------------------


def test_revisions_by_pattern_and_disk_given_back(hub: SeriesHub, tmp_path: Path) -> None:
    out, home = tmp_path / "run.safetensors", tmp_path / "home"
    first = run(f"hs.open('{REPO}@step4').read('Q', 0)", home, hub.address)  # someone else's use of the cache
    assert first.returncode == 0, first.stderr
    before = files_in(home)
    assert any("model.safetensors" in name for name in before)
    most = "most = 0\ndef watch(done, total):\n    global most\n"
    most += f"    most = max(most, sum(f.stat().st_size for f in __import__('pathlib').Path(r'{home}').rglob('*') "
    most += "if f.is_file() and not f.is_symlink()))\n"
    done = run(most + f"told('{REPO}@step*', r'{out}', progress=watch)\nprint(most)", home, hub.address)
    assert "Series of 5 steps, someone/series@step0 to someone/series@step8" in done.stdout, done.stderr
    assert files_in(home) == before  # what was there is there, what came is gone
    size = len(checkpoint(0)["model.safetensors"])
    assert int(done.stdout.split()[-1]) < 2 * size
    assert {r for r, name in hub.downloaded if name == "README.md"} == set()
    run(f"told('{REPO}@step*', r'{out}', keep=True)", home, hub.address)
    assert len([name for name in files_in(home) if name.endswith("model.safetensors")]) == 5


def test_a_killed_step_is_cleaned_up_by_the_next_run(hub: SeriesHub, tmp_path: Path) -> None:
    out, home = tmp_path / "run.safetensors", tmp_path / "home"
    kill = (
        "from headspan.change import track as tracking\n"
        "whole = tracking._Tracker._edges\n"
        "def die(self, *args):\n"
        "    if self.chosen: os.kill(os.getpid(), 9)\n"
        "    return whole(self, *args)\n"
        "tracking._Tracker._edges = die\n"
    )
    killed = run(kill + f"told('{REPO}@step*', r'{out}')", home, hub.address)
    assert killed.returncode == -9 and files_in(home)
    done = run(f"told('{REPO}@step*', r'{out}')", home, hub.address)
    assert done.stdout.startswith("Series of 5"), done.stderr
    assert not files_in(home)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (f"told(['{REPO}@step0', '{REPO}@step3'])", "'step3'"),
        (f"told('{REPO}@step*', steps=[0, 3])", "step 3"),
        (f"told('{REPO}@epoch*')", "'epoch*'"),
        ("told('someone/other@step*')", "someone/other could not be opened"),
    ],
)
def test_missing_revisions_are_reported_before_any_work(
    code: str, sentence: str, hub: SeriesHub, tmp_path: Path
) -> None:
    result = run(code, tmp_path / "home", hub.address)
    assert result.stdout.startswith("refused:") and sentence in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1 and not hub.downloaded


def test_a_revision_that_is_listed_but_gone(hub: SeriesHub, tmp_path: Path) -> None:
    hub.unlisted.add("step2")
    result = run(f"told('{REPO}@step*', r'{tmp_path / 'run.safetensors'}')", tmp_path / "home", hub.address)
    assert "someone/series@step2 could not be opened" in result.stdout, result.stderr
    assert "(3 of 5 steps are kept" in result.stdout


def test_one_checkpoint_under_two_revisions(hub: SeriesHub, tmp_path: Path) -> None:
    hub.revisions["step4"] = checkpoint(1)  # another commit with the weights of step1
    result = run(f"told('{REPO}@step*', r'{tmp_path / 'run.safetensors'}')", tmp_path / "home", hub.address)
    assert f"refused: {REPO}@step1 and {REPO}@step4 have equal attention weights" in result.stdout, result.stderr


# -- the command -----------------------------------------------------------------------------------------------


def test_command_line(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "run.safetensors"
    runner = CliRunner()
    made = runner.invoke(app, ["track", *map(str, folders), "--steps", "0,2,8", "-k", "2", "--out", str(out), "--json"])
    rows = json.loads(made.stdout)
    assert rows[0]["table"] == "trajectory" and {row["birth"] for row in rows} <= {0, 2, 8}
    table = runner.invoke(app, ["track", str(out), "--table", "all", "--csv"]).stdout
    rows = list(csv.DictReader(io.StringIO(table)))
    assert {row["table"] for row in rows} == {"trajectory", "edge", "drift", "hub"}
    text = runner.invoke(app, ["track", str(out)]).stdout
    assert "birth" in text and max(map(len, text.splitlines())) <= 80
    for arguments, sentence in [
        (["track", str(out), "--table", "x"], "unknown table 'x'"),
        (["track", *map(str, folders), "--steps", "a", "--out", str(out)], "'a' is not a list"),
    ]:
        assert sentence in str(runner.invoke(app, arguments).exception)
    assert os.path.exists(out)
