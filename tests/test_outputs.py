"""Inputs and foreign files are never overwritten: every command and function, every bad output."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import headspan as hs
from headspan.cli import _run
from headspan.plotting import Context, draw, file_names, save_wiring
from headspan.results.head_scores import BehaviourScores
from headspan.results.labels import write_labels
from headspan.running.behaviour import KINDS
from headspan.scoring import run as scoring
from headspan.system import outputs
from headspan.vocabulary.heads import Head

DEMO = Path(hs.__file__).parent / "data" / "demo"
# Every option that names a file to write, with the ending that it needs: {place} is where it goes.
FILES = {
    "score": ("score model --out {place}", ".safetensors"),
    "report of a model": ("report model --out {place}", ".html"),
    "report of a result": ("report r.safetensors --out {place}", ".html"),
    "wiring json": ("wiring r.safetensors --out {place}", ".json"),
    "wiring csv": ("wiring r.safetensors --labels labels.csv --out {place}", ".csv"),
    "wiring graphml": ("wiring r.safetensors --out {place}", ".graphml"),
    "wiring png": ("wiring r.safetensors --out {place}", ".png"),
    "wiring pdf": ("wiring model --out {place}", ".pdf"),
    "behaviour out": ("behaviour model --text text.txt --out {place}", ".json"),
    "behaviour labels": ("behaviour model --text text.txt --labels-out {place}", ".csv"),
    "diff": ("diff model model --out {place}", ".safetensors"),
    "paths": ("paths model --to L1H2 --depth 1 --out {place}", ".json"),
}
FOLDERS = {
    "figures": ("figures r.safetensors --only scatter --out {place}", "scatter.png"),
    "figures pdf": ("figures model --only scatter --format pdf --out {place}", "scatter.pdf"),
    "reproduce": ("reproduce model --out {place}", "ours.json"),
    "site": ("site {place} r.safetensors --tokens 0", "demo.html"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(DEMO, folder / "model")
    hs.score(hs.open(folder / "model"), out=folder / "r.safetensors")
    (folder / "labels.csv").write_text("head,label\nL0H1,mine\n")
    (folder / "text.txt").write_text("a text of mine")
    return folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a result, labels and a text, in which no work may be done."""
    folder = tmp_path / "place"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("work was done before the output was refused")

    monkeypatch.setattr(scoring, "compute_tile", work)
    monkeypatch.setattr("headspan.running.behaviour.running", work)
    monkeypatch.setattr("headspan.plotting.canvas._drawn", work)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Kind and content of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path)] = (mode, content)
    return found


# The second is for a name of another kind of file, which is reported first.
REFUSALS = re.compile("cannot write|must end in|cannot draw|not a headspan result")


def refused(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    before = snapshot(Path.cwd())
    code = _run([*command.split(" "), *more])
    captured = capsys.readouterr()
    assert code == 2 and REFUSALS.search(captured.err) and len(captured.err.splitlines()) == 1, captured.err
    assert not captured.out and snapshot(Path.cwd()) == before


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # relative: a socket's path is short


def linked(path: Path, target: str, make: Callable[..., object] = Path.symlink_to) -> None:
    make(path, Path(target).absolute())


# Obstacles in the place of an output, each made at the path that is then given.
IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": bind,
    "a link to nothing": lambda path: linked(path, "nothing"),
    "a link to itself": lambda path: linked(path, str(path)),
    "a link to a device": lambda path: path.symlink_to("/dev/null"),
    "a file of the user's": lambda path: path.write_text("my notes"),
    "an empty file of the user's": lambda path: path.write_text(""),
    "a link to a file of the user's": lambda path: linked(path, "labels.csv"),
    "the weights, by a hard link": lambda path: linked(path, "model/model.safetensors", Path.hardlink_to),
    "the weights, by a link": lambda path: linked(path, "model/model.safetensors"),
    "the config, by a link": lambda path: linked(path, "model/config.json"),
    "the tokenizer, by a hard link": lambda path: linked(path, "model/tokenizer.json", Path.hardlink_to),
}
INPUTS = [name for name in IN_THE_WAY if name.startswith("the ")]


# Every command meets the main kinds, and two commands meet all.
TABLE = [
    (command, obstacle)
    for command in FILES
    for obstacle in IN_THE_WAY
    if command in ("score", "wiring json")
    or obstacle in ("a pipe", "a file of the user's", "the weights, by a hard link")
]


@pytest.mark.parametrize(("command", "obstacle"), TABLE)
def test_files_in_the_way_are_kept(
    command: str, obstacle: str, place: Path, capsys: pytest.CaptureFixture[str], no_work: None
) -> None:
    text, ending = FILES[command]
    IN_THE_WAY[obstacle](Path(f"x{ending}"))
    refused(text.format(place=f"x{ending}"), capsys)
    of_a_result = "r.safetensors" in text  # its model is not read
    if "file of the user's" not in obstacle and not (of_a_result and obstacle in INPUTS):
        refused(text.format(place=f"x{ending}"), capsys, "--force")


BAD_NAMES = ["r.safetensors/x", "n" * 300, "d/" * 2100 + "x", "a\0b", "a\ud800b", "/proc/x"]


@pytest.mark.parametrize(
    ("command", "name"), [*((c, "text.txt/x") for c in FILES), *(("score", name) for name in BAD_NAMES)]
)
def test_places_that_take_no_file(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str], no_work: None
) -> None:
    text, ending = FILES[command]
    start, _, end = text.partition("{place}")
    before = snapshot(place)
    code = _run([*start.split(), name + ending, *end.split(), "--force"])
    err = capsys.readouterr().err
    assert code == 2 and ("cannot write" in err or "Invalid value" in err) and len(err.splitlines()) == 1, err
    assert snapshot(place) == before


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("obstacle", ["a file", "a pipe", "below a file", "a foreign file in it"])
def test_folders(command: str, obstacle: str, place: Path, capsys: pytest.CaptureFixture[str], no_work: None) -> None:
    text, name = FOLDERS[command]
    where = "labels.csv/x" if obstacle == "below a file" else "x"
    if obstacle == "a file":
        Path("x").write_text("mine")
    elif obstacle == "a pipe":
        os.mkfifo("x")
    elif obstacle == "a foreign file in it":
        Path("x").mkdir()
        (Path("x") / name).write_text("mine")
    refused(text.format(place=where), capsys)


ATTACKS = [
    "score model --out model/model.safetensors",
    "score model --out ./model/../model/model.safetensors",
    "score model --out link/model.safetensors",
    "score model/model.safetensors --out model/model.safetensors",
    "score link --out model/config.json",
    "score model --out model/tokenizer.json",
    "score model --out model/pytorch_model.bin",
    "report r.safetensors --out r.safetensors",
    "report r.safetensors --out deep/../r.safetensors",
    "report model --out model/model.safetensors",
    "report r.safetensors --labels labels.csv --out labels.csv",
    "report r.safetensors --weights model --out model/config.json",
    "wiring r.safetensors --labels labels.csv --out labels.csv",
    "wiring model --out model/config.json",
    "wiring r.safetensors --out same.json --out same.json",
    "wiring r.safetensors --out same.json --out ./same.json",
    "wiring r.safetensors --out same.json --out same.json/x.csv",
    "behaviour model --text old.json --out old.json",
    "behaviour model --out both --labels-out both",
    "behaviour model --into r.safetensors --out r.safetensors",
    "behaviour model --into model/model.safetensors",
    "behaviour model --out model/config.json",
    "diff model model --out model/model.safetensors",
]


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("command", ATTACKS)
def test_an_input_is_never_an_output(
    command: str, force: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str], no_work: None
) -> None:
    Path("link").symlink_to("model")
    Path("deep").mkdir()
    Path("old.json").write_text('{"identity": {"L0H0": 0.5}}')  # one of ours, and here the text to measure on
    if force and command.endswith("--into model/model.safetensors"):
        return  # it is not a result
    refused(command, capsys, *force)


def test_in_the_directory_of_the_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``score .``: weights are safe, and a result next to them can be made twice."""
    monkeypatch.chdir(place / "model")
    before = snapshot(place / "model")
    for name in ("model.safetensors", "./config.json", f"{place}/model/model.safetensors"):
        assert _run(["score", ".", "--out", name, "--force"]) == 2
    assert snapshot(place / "model") == before
    for _ in range(2):
        assert _run(["score", ".", "--metric", "pk", "--out", "scores.safetensors"]) == 0
    assert {name: snapshot(place / "model")[name] for name in before} == before


def test_force_replaces_what_is_not_read(place: Path) -> None:
    for name, command in {
        "x.safetensors": "score model --metric pk --out",
        "x.html": "report r.safetensors --tokens 0 --out",
        "x.csv": "wiring r.safetensors --out",
    }.items():
        Path(name).write_text("mine")
        assert _run([*command.split(), name]) == 2 and Path(name).read_text() == "mine"
        assert _run([*command.split(), name, "--force"]) == 0
        assert _run([*command.split(), name]) == 0, "its own file is replaced without being forced"
        Path(name).chmod(0o444)
        assert _run([*command.split(), name]) == 2, "a write-protected one is not"


def test_a_link_to_our_own_file_stays_a_link(place: Path) -> None:
    Path("link.safetensors").symlink_to("r.safetensors")
    assert _run(["score", "model", "--metric", "pk", "--out", "link.safetensors"]) == 0
    assert Path("link.safetensors").is_symlink() and hs.load("r.safetensors").metrics == ("pk",)


def behaviour_scores() -> BehaviourScores:
    return BehaviourScores((Head(0, 0),), {kind: np.array([0.5]) for kind in KINDS})


# Every function that writes a file; each is given a path and whether it may force.
WRITERS: dict[str, tuple[str, Callable[[hs.Scores, Path, bool], object]]] = {
    "Scores.save": (".safetensors", lambda s, p, f: s.save(p, force=f)),
    "score": (".safetensors", lambda s, p, f: hs.score(hs.open("model"), "pk", "OK", out=p, force=f)),
    "report": (".html", lambda s, p, f: hs.report(s, None, p, tokens=0, force=f)),
    "Report.save": (".html", lambda s, p, f: hs.report(s, tokens=0).save(p, force=f)),
    "Circuit.save": (".json", lambda s, p, f: hs.Circuit("mine", "demo", ()).save(p, force=f)),
    "Wiring.to_json": (".json", lambda s, p, f: hs.wiring(s).to_json(p, force=f)),
    "Wiring.to_csv": (".csv", lambda s, p, f: hs.wiring(s).to_csv(p, force=f)),
    "Wiring.to_graphml": (".graphml", lambda s, p, f: hs.wiring(s).to_graphml(p, force=f)),
    "save_wiring png": (".png", lambda s, p, f: save_wiring(hs.wiring(s), p, force=f)),
    "save_wiring pdf": (".pdf", lambda s, p, f: save_wiring(hs.wiring(s), p, force=f)),
    "save_wiring svg": (".svg", lambda s, p, f: save_wiring(hs.wiring(s), p, force=f)),
    "write_labels": (".csv", lambda s, p, f: write_labels(behaviour_scores().labels(), p, force=f)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_functions_ask_too(name: str, place: Path) -> None:
    ending, write = WRITERS[name]
    scores = hs.load("r.safetensors")
    hs.open("model").fingerprint()
    out = Path(f"out{ending}")
    write(scores, out, False)
    write(scores, out, False)  # our own file of that kind is replaced
    mine = Path(f"mine{ending}")
    mine.write_text("mine")
    read = Path(f"read{ending}")
    read.hardlink_to("model/model.safetensors")
    before = snapshot(place)
    for path, force in ((mine, False), (read, False), (read, True), (place, True), (Path("/dev/null"), True)):
        with pytest.raises(hs.HeadspanError, match=r"cannot (write|draw)"):
            write(scores, path, force)
    assert snapshot(place) == before
    write(scores, mine, True)
    assert mine.read_bytes() != b"mine"


@pytest.mark.parametrize("path", ["", " ", "-", "a\0b", "\ud800", 3, None, b"bytes", ["x"], "x/"])
def test_odd_paths(path: object) -> None:
    with pytest.raises(hs.HeadspanError, match=r"cannot write|is the path of a file"):
        outputs.check_output(path, "json")  # type: ignore[arg-type]


def test_figures_write_the_files_they_announce(place: Path) -> None:
    drawn = draw(["grid", "scatter", "random"], Context(hs.load("r.safetensors"), k=3), "figures", "png,svg")
    assert {path.name for path in drawn.files} <= set(file_names(["grid", "scatter", "random"], 3, ["png", "svg"]))
    assert len(drawn.files) > 4


def test_no_writer_goes_around_the_check() -> None:
    """Only the tile store, whose folder is ours, writes without asking."""
    allowed = {
        "tiles.py": {"atomic_path"},
        "scores_file.py": {"write_sealed"},
        "diff.py": {"write_sealed"},
        "series_file.py": {"write_sealed"},
    }
    for path in Path(hs.__file__).parent.rglob("*.py"):
        if path.parent.name == "system":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        used = names & {"atomic_path", "write_safetensors", "write_sealed"}
        assert used <= allowed.get(path.name, set()), f"{path.name} writes with {used}: use headspan.system.outputs"
        if "write_sealed" in used:
            assert "check_output" in names


def test_every_command_that_writes_can_be_forced() -> None:
    import typer.main

    from headspan.cli import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = {parameter.name for parameter in command.params}
        if options & {"out", "labels_out"}:  # --into adds to a result, which must be one
            assert "force" in options, name


# ---------------------------------------------------------------- nothing is left behind

HEADSPAN = [sys.executable, "-m", "headspan"]


@pytest.mark.parametrize(
    "command", ["report r.safetensors --out new/deep/x.html", "wiring r.safetensors --out d/x.pdf"]
)
def test_a_full_disk_leaves_nothing(command: str, place: Path) -> None:
    """A file-size limit simulates a full disk: the write fails with the same kind of error."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "from headspan.cli import main; sys.argv = ['headspan', *sys.argv[1:]]; main()"
    )
    before = snapshot(place)
    done = subprocess.run([sys.executable, "-c", limited, *command.split()], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot write" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert snapshot(place) == before


def test_output_that_nobody_reads(place: Path) -> None:
    """A closed pipe and a full device give one line and a nonzero exit code."""
    for arguments in (["top", "r.safetensors", "-k", "100000", "--json"], ["info", "demo"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([*HEADSPAN, *arguments], stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert done.returncode == 141 and "closed before all of it" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
        with open("/dev/full", "w") as full:
            done = subprocess.run([*HEADSPAN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_killed_run_is_cleaned_up_by_the_next(place: Path) -> None:
    """Files that SIGKILL leaves next to an output are recognised by name, and only those are removed."""
    killed = (
        "import os, signal, sys; from headspan.system.outputs import writing\n"
        "with writing('x.html', 'page') as temporary:\n"
        "    temporary.write_text('half a page'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    (orphan,) = Path().glob(".headspan-*.tmp")
    others = [Path(orphan.name[:-5] + "x.tmpx"), Path(".x.html-abc.tmp"), Path(".headspan-mine.tmp")]
    for path in others:
        path.write_text("mine")
    link = Path(orphan.name.replace(orphan.name[-12:-4], "00000000"))
    link.symlink_to("labels.csv")
    with outputs.writing("x.html", "page") as temporary:
        held = temporary
        with outputs.writing("x.html", "page") as second:  # another run at the same time loses nothing
            assert held.exists() and second != held
    assert not orphan.exists() and all(path.read_text() == "mine" for path in others) and link.is_symlink()
    assert not held.exists()


# ---------------------------------------------------------------- many runs at once


# One process that has read the program already becomes many, each of which runs one command.
MANY = """
import os, sys, random, time
from headspan.cli import _run
import headspan.scoring.run, headspan.models.checkpoint, headspan.checkpoints.huggingface, safetensors.numpy
plans = [["-m", m, "-p", p] for m in ("pk", "cs", "simple_cs") for p in ("OQ", "OK", "OV", "QQ")]
count, at_once, running, bad = int(sys.argv[1]), 20, 0, 0
for n in range(count):
    if running == at_once:
        bad, running = bad + (os.wait()[1] != 0), running - 1
    if os.fork() == 0:
        time.sleep(random.random() / 5)
        os._exit(_run(["score", "model", "--out", "many.safetensors", *plans[n % len(plans)]]))
    running += 1
while running:
    bad, running = bad + (os.wait()[1] != 0), running - 1
print(bad)
"""


@pytest.mark.slow
def test_runs_of_different_plans_do_not_disturb_each_other(place: Path, cache: Path) -> None:
    """Every one succeeds, and the last result is one of theirs. HEADSPAN_MANY_RUNS=200 makes it the larger test."""
    count = os.environ.get("HEADSPAN_MANY_RUNS", "40")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", MANY, count], capture_output=True, text=True, env=environment)
    assert done.stdout == "0\n", [line for line in done.stderr.splitlines() if "headspan: " in line]
    assert "cannot be saved" not in done.stderr and "computed again" not in done.stderr
    result = hs.load("many.safetensors")
    (metric, pairing), values = next(iter(result.arrays.items()))
    alone = hs.score(hs.open("model"), metric, pairing)
    np.testing.assert_array_equal(values, alone[metric, pairing].values)
    assert not list(cache.rglob("*.*")) and not list(place.glob(".headspan*"))


def test_stores_of_one_plan_and_of_others_at_once(tmp_path: Path, cache: Path) -> None:
    """Hundreds of starts and ends of runs in many processes; none loses a tile that it just saved."""
    script = (
        "import sys, warnings, numpy as np; from headspan.scoring.tiles import TileStore\n"
        "warnings.simplefilter('error')\n"
        "for n in range(25):\n"
        "    with TileStore(sys.argv[1], f'plan {n % 3}') as store:\n"
        "        store.save('pk-00000', {'a': np.full((2, 2), n % 3)})\n"
        "        kept = store.load('pk-00000')\n"
        "        assert kept is not None and (kept['a'] == n % 3).all()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "r.safetensors")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * 8, errors
    assert not [path for path in cache.rglob("*") if path.name != "unfinished"]


def test_json_of_a_wiring_names_its_maker(place: Path) -> None:
    hs.wiring(hs.load("r.safetensors")).to_json("w.json")
    assert json.loads(Path("w.json").read_text())["generator"] == "headspan"


def test_scores_do_not_replace_a_comparison(tmp_path: Path) -> None:
    """Each kind of result file is replaced by its own kind alone; and a listing by a new one of the same."""
    changed = tmp_path / "diff.safetensors"
    hs.diff("demo", "demo").save(changed)
    before = changed.read_bytes()
    with pytest.raises(hs.HeadspanError, match="not a headspan result"):
        hs.score("demo", "pk", "OK", out=changed)
    assert changed.read_bytes() == before
    hs.diff("demo", "demo").save(changed)
    hs.score("demo", "pk", "OK", out=changed, force=True)
    for _ in range(2):
        hs.wiring("demo", k=2).to_csv(tmp_path / "w.csv")


@pytest.mark.parametrize("command", ["figures r.safetensors --only wiring --out", "site", "reproduce model --out"])
@pytest.mark.parametrize("name", ["model", "./model/", "link", "weights"])
def test_no_folder_of_files_goes_into_a_model(
    command: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link").symlink_to("model")
    Path("weights").mkdir()
    Path("weights/llama.Q4.gguf").write_bytes(b"GGUF")
    before = snapshot(place)
    words = [*command.split(), name, *(["r.safetensors"] if command == "site" else [])]
    for more in ([], ["--force"]):
        assert _run([*words, *more]) == 2
        assert "another folder" in capsys.readouterr().err or (command == "site" and not more)
    assert snapshot(place) == before


def test_a_result_does_not_join_weights_without_a_standard_name(place: Path) -> None:
    shutil.copytree("model", "other")
    Path("other/model.safetensors").rename("other/my-weights.safetensors")
    assert _run(["score", "other", "--metric", "pk", "--out", "other/r.safetensors"]) == 2
    assert _run(["score", "other", "--metric", "pk", "--out", "new.safetensors"]) == 0
    hs.open("other")
