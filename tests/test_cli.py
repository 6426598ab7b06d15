"""The command line on bad input: exit code 2, one line on stderr, nothing on stdout, never a traceback."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
from seeds import write_seeds

import headspan as hs
from headspan.cli import app, main

DOCS = Path(__file__).parent.parent / "docs"
# How every command is called; {ref} is a model or result, {out} a file to write, {labels} a label file.
COMMANDS = {
    "info": "info {ref}",
    "score": "score {ref} --out {out}.safetensors",
    "top": "top {ref}",
    "compare": "compare {ref} {ref}",
    "diff": "diff {ref} {ref}",
    "track": "track {labels} {ref} --out {out}.safetensors",
    "hubs": "hubs {ref}",
    "baseline": "baseline {ref}",
    "evaluate": "evaluate {ref} --labels {labels}",
    "tokens": "tokens {ref} L0H0",
    "pair": "pair {ref} L0H0.O L1H2.K",
    "behaviour": "behaviour {ref}",
    "effects": "effects {ref}",
    "observe": "observe {ref} --out {out}.safetensors",
    "task": "task {ref} induction",
    "wiring": "wiring {ref}",
    "figures": "figures {ref} --out {out}",
    "report": "report {ref} --out {out}.html",
    "reproduce": "reproduce {ref}",
    "paths": "paths {ref} --to L1H2",
    "nodes": "nodes {ref} --unembedding",
    "links": "links {ref} {labels} --transcoders layer_{{}}.npz",
    "site": "site {out} {ref}",
    "cache": "cache",
    "skill": "skill",
    "mcp": "mcp {out}",
}
NO_MODEL = ("cache", "skill", "mcp")  # the commands that take none
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headspan", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return (code if isinstance(code, int) else 0, *capfd.readouterr())

    return call


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "files"
    write_seeds(folder)
    return folder


@pytest.fixture
def files(good: Path, tmp_path: Path) -> Path:
    """A fresh copy of small valid files: gpt2/, llama/, llama.gguf, result.safetensors, labels.csv."""
    import shutil

    return Path(shutil.copytree(good, tmp_path / "files"))


def arguments_of(command: str, ref: object, files: Path) -> list[str]:
    return [
        part.format(ref=ref, out=files.parent / "made", labels=files / "labels.csv")
        for part in COMMANDS[command].split()
    ]


def assert_refused(outcome: tuple[int, str, str], words: str) -> None:
    code, out, err = outcome
    assert code == 2, (code, out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("headspan: ")
    assert words in lines[0]


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Trap:
    """A pickle that makes a file when it is loaded the careless way."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def pickle_with_code(files: Path) -> Path:
    (files / "gpt2" / "model.safetensors").unlink()
    write(files / "gpt2" / "pytorch_model.bin", pickle.dumps({"h.0.attn.c_attn.weight": Trap(files / "sprung")}))
    return files / "gpt2"


def zip_bomb(files: Path) -> Path:
    (files / "gpt2" / "model.safetensors").unlink()
    path = files / "gpt2" / "model.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(50_000_000))
    return path


def link_out(files: Path) -> Path:
    outside = (files / "gpt2" / "model.safetensors").rename(files / "elsewhere.safetensors")
    (files / "gpt2" / "model.safetensors").symlink_to(outside)
    return files / "gpt2"


def shard_outside(name: str) -> Callable[[Path], Path]:
    def make(files: Path) -> Path:
        index = files / "llama" / "model.safetensors.index.json"
        tree = json.loads(index.read_text())
        tree["weight_map"]["model.layers.0.self_attn.q_proj.weight"] = name
        index.write_text(json.dumps(tree))
        return files / "llama"

    return make


def terabytes(files: Path) -> Path:
    """A sparse file whose header and config agree on 4 TB of attention."""
    d = 2**19
    shapes = {"h.0.attn.c_attn.weight": [d, 3 * d], "h.0.attn.c_proj.weight": [d, d]}
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    path = write(files / "gpt2" / "model.safetensors", len(raw).to_bytes(8, "little") + raw)
    try:
        os.truncate(path, 8 + len(raw) + position)
    except OSError:
        pytest.skip("this file system has no files of 4 TB")
    return change_config(files / "gpt2", n_embd=d, n_head=2**10, n_layer=1)


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing path": (lambda f: f / "nothing" / "here", "no such file or directory"),
    "path tricks": (lambda f: "../../../etc/passwd@main", "no such file or directory"),
    "id tricks": (lambda f: "a/../b", "no such file or directory"),
    "empty directory": (lambda f: write(f / "empty" / ".x", b"").parent, "holds no weights"),
    "junk safetensors": (lambda f: write(f / "junk.safetensors", b"hello" * 99), "not a valid safetensors file"),
    "junk gguf": (lambda f: write(f / "junk.gguf", b"hello" * 99), "not a valid GGUF file"),
    "junk bin": (lambda f: write(f / "gpt2" / "junk.bin", b"hello" * 99), "junk.bin"),
    "another kind of file": (lambda f: write(f / "notes.txt", b"hello"), "is not a model"),
    "unknown architecture": (
        lambda f: change_config(f / "gpt2", model_type="nonesuch"),
        "unknown model_type 'nonesuch'",
    ),
    "config without heads": (lambda f: change_config(f / "gpt2", n_head=None), "n_heads: one of"),
    "absurd number of heads": (
        lambda f: change_config(f / "gpt2", n_head=10**12),
        "n_head = 1000000000000: no model is that large",
    ),
    "absurd number of layers": (
        lambda f: change_config(f / "gpt2", n_layer=10**12),
        "n_layer = 1000000000000",
    ),
    "absurd width": (
        lambda f: change_config(f / "gpt2", n_embd=2**60),
        "n_embd = 1152921504606846976",
    ),
    "terabytes": (terabytes, "B"),
    "shard outside": (shard_outside("../../x.safetensors"), "outside the directory"),
    "shard at the root": (shard_outside("/etc/x.safetensors"), "outside the directory"),
    "link outside": (link_out, "outside its directory"),
    "pickle with code": (pickle_with_code, "pytorch_model.bin"),
    "zip bomb": (zip_bomb, "model.pth"),
}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NO_MODEL])
@pytest.mark.parametrize("fault", ["missing path", "junk safetensors", "unknown architecture", "config without heads"])
def test_every_command_refuses_a_bad_model(run: Run, files: Path, command: str, fault: str) -> None:
    make, words = BAD_MODELS[fault]
    by_transformers = command in ("behaviour", "observe") and fault in ("unknown architecture", "config without heads")
    assert_refused(run(*arguments_of(command, make(files), files)), "" if by_transformers else words)
    assert not list(files.parent.glob("made*"))


@pytest.mark.parametrize("command", ["paths", "report"])
def test_a_missing_result_is_not_called_a_model(run: Run, files: Path, command: str) -> None:
    refused = run(*arguments_of(command, files / "none.safetensors", files), "--weights", "demo")
    assert_refused(refused, "no such file or directory")
    model = run(*arguments_of(command, "demo", files), "--weights", "demo")
    assert_refused(model, "--weights")


@pytest.mark.parametrize("command", ["info", "score", "pair"])
@pytest.mark.parametrize("fault", BAD_MODELS)
def test_every_bad_model_is_refused(run: Run, files: Path, command: str, fault: str) -> None:
    make, words = BAD_MODELS[fault]
    outcome = run(*arguments_of(command, make(files), files))
    if (command, fault) == ("info", "terabytes"):  # nothing is read, so the size can be reported
        assert outcome[0] == 0
    else:
        assert_refused(outcome, words)
    assert not (files / "sprung").exists()


def test_the_trap_in_the_pickle_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung"))).close()
    assert (tmp_path / "sprung").exists()


READ_NO_KEYS = ("links", "info", "tokens", "reproduce", "behaviour", "effects", "observe", "nodes", *NO_MODEL)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in READ_NO_KEYS])
def test_a_weight_of_nan_is_named(run: Run, files: Path, command: str) -> None:
    path = files / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    tensors["h.1.attn.c_attn.weight"][5, 16 + 2 * 4 + 1] = np.nan  # keys come after 16 queries, four to a head
    save_file(tensors, path)
    assert_refused(run(*arguments_of(command, path.parent, files)), "weight K of head L1H2 (layer 1)")


def test_info_finds_a_weight_of_nan_when_asked(run: Run, files: Path) -> None:
    path = files / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    tensors["h.0.attn.c_proj.weight"][3] = np.inf
    save_file(tensors, path)
    assert run("info", str(path.parent))[0] == 0
    assert_refused(run("info", str(path.parent), "--check"), "weight O of head L0H0 (layer 0)")
    assert_refused(run("tokens", str(path.parent), "L0H0"), "weight O of head L0H0 (layer 0)")


BAD_OPTIONS = [
    ("top {result} --pairing OX", "unknown pairing 'OX'"),
    ("top {result} --metric cosine", "unknown similarity 'cosine'"),
    ("top {result} --metric procrustes", "no procrustes scores"),
    ("top {result} --pairing VV", "no pk scores for VV"),
    ("top {result} -k -3", "-k"),
    ("top {result} -k many", "-k"),
    ("hubs {result} --pairings O", "unknown pairing 'O'"),
    ("hubs {result} --metric none", "no none scores"),
    ("hubs {result} --json --csv", "only one of them"),
    ("top {result} --head L9H9", "no head L9H9"),
    ("top {result} --layer 7", "layer 7"),
    ("top {result} --label induction", "give --labels"),
    ("top {result} --labels behaviour", "headspan behaviour"),
    ("baseline {result} --null reversed", "--pairing"),
    ("wiring {result} --null reversed", "the rule significance"),
    ("score {gpt2} --out {out}.sft", ".safetensors"),
    ("compare {result} {result} --pairing VV", "in common"),
    ("report {gpt2} --weights {gpt2} --out {out}.html", "--weights"),
    ("hubs {result} --labels nowhere.csv", "nowhere.csv"),
    ("hubs {result} --top 0", "--top"),
    ("baseline {result} --pairing ZZ", "unknown pairing 'ZZ'"),
    ("baseline {result} --null chance", "--null"),
    ("baseline {result} --q 3", "--q"),
    ("evaluate {result} --labels nowhere.csv", "nowhere.csv"),
    ("evaluate {result} --labels gpt2-ioi", "this model does not have"),
    ("evaluate {result} --labels {junk}", "cannot be read as a text file of labels"),
    ("evaluate {result}", "--labels"),
    ("wiring {result} --rule best", "'best'"),
    ("wiring {result} --out wiring.doc", ".doc"),
    ("wiring {result} --labels nowhere.csv", "nowhere.csv"),
    ("figures {result} --out {out} --only portrait", "'portrait'"),
    ("figures {result} --out {out} --format bmp", "bmp"),
    ("figures {result} --out {out} --weights {llama}", "not the model of this result"),
    ("report {result} --out {out}.html --weights {llama}", "not the model of this result"),
    ("compare {result} {junk}", "junk.csv"),
    ("tokens {gpt2} L9H0", "no head L9H0"),
    ("tokens {gpt2} head", "'head' is not a head name"),
    ("tokens {gpt2} L0H0 --role X", "X"),
    ("tokens {gpt2} L0H0 --preprocess nothing", "'nothing'"),
    ("tokens {gpt2} L0H0 --top 0", "--top"),
    ("tokens {gpt2}", "--all"),
    ("tokens {llama} L0H9 --role K", "no head L0H9"),
    ("pair {gpt2} L0H0. L1H0.K", "'L0H0.' is not a head with a role"),
    ("pair {gpt2} L0H0.O L1H7.K", "no head L1H7"),
    ("pair {gpt2} L0H0.O", "Missing argument"),
    ("score {gpt2} --out {out}.safetensors --metric cosine", "unknown similarity 'cosine'"),
    ("score {gpt2} --out {out}.safetensors --pairing 12", "unknown pairing '12'"),
    ("score {gpt2} --out {out}.safetensors --memory lots", "'lots'"),
    ("score {gpt2} --out {out}.safetensors --memory 1kB", "too little"),
    ("score {gpt2} --out {out}.safetensors --pairs some", "'some'"),
    ("score {gpt2} --out {out}.safetensors --route scenic", "'scenic'"),
    ("score {gpt2} --out {out}.safetensors --device abacus", "'abacus'"),
    ("score {gpt2} --out {out}.safetensors --dask nowhere", "nowhere"),
    ("score {gpt2} --out {junk}/x.safetensors", "cannot write"),
    ("report {result} --out {junk}/x.html", "cannot write"),
    ("wiring {result} --pairing OK --out {junk}/x.csv", "cannot write"),
    ("figures {result} --out {junk} --only scatter", "cannot write"),
    ("behaviour {gpt2} --best 3", "--labels-out"),
    ("behaviour {gpt2} --text nowhere.txt", "nowhere.txt"),
    ("behaviour {gpt2} --into {junk}", "junk.csv"),
    ("reproduce {gpt2}", "GPT-2 small"),
    ("nonsense", "'nonsense'"),
    ("info", "Missing argument 'MODEL'"),
    ("info {gpt2} --nonsense", "--nonsense"),
]


@pytest.mark.parametrize(("line", "words"), BAD_OPTIONS, ids=[line for line, _ in BAD_OPTIONS])
def test_bad_options_are_refused(run: Run, files: Path, line: str, words: str) -> None:
    junk = write(files / "junk.csv", b"\xff\xfe junk \n")
    names = {"gpt2": files / "gpt2", "llama": files / "llama", "result": files / "result.safetensors"}
    arguments = [part.format(**names, junk=junk, out=files.parent / "made") for part in line.split()]
    assert_refused(run(*arguments), words)
    assert not list(files.parent.glob("made*"))


def test_results_of_other_kinds_are_refused(run: Run, files: Path) -> None:
    result, other = files / "result.safetensors", files / "statistics.safetensors"
    hs.observe("demo", random=True, sequences=2, length=6).save(other)
    before = other.read_bytes()
    kind = "holds a result of the kind 'statistics', not the scores of one model: make those with headspan score MODEL"
    assert_refused(run("effects", "demo", "--into", str(other)), kind)
    assert other.read_bytes() == before
    line = ("task", "demo", "induction", "--stats", str(result))
    assert_refused(run(*line), "make those with headspan observe MODEL")
    circuit = ("task", "demo", "induction", "--circuit", str(other))
    assert_refused(run(*circuit), "it is not UTF-8. Give another file")


def test_a_result_of_a_newer_version_is_refused(run: Run, files: Path) -> None:
    path = files / "result.safetensors"
    save_file(load_file(path), path, {"headspan": json.dumps({"schema": 99})})
    for command in ("top", "hubs", "baseline", "wiring", "evaluate", "compare", "report", "figures"):
        assert_refused(run(*arguments_of(command, path, files)), "newer headspan")


def in_a_new_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headspan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, encoding="utf-8")


@pytest.mark.parametrize("command", ["info", "top"])
def test_a_hub_id_while_offline(files: Path, command: str) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(files / "cache")}
    done = in_a_new_process(*arguments_of(command, "someone/some-model", files), **environment)
    assert_refused((done.returncode, done.stdout, done.stderr), "someone/some-model")


ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TURKISH = {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"}


@pytest.mark.parametrize("environment", [ASCII, C_LOCALE, TURKISH], ids=["ascii", "C", "Turkish"])
@pytest.mark.parametrize(
    "line", ["pair {gpt2} L0H0.O L1H0.K", "tokens {gpt2} --norms", "evaluate {result} --labels {labels}"]
)
def test_letters_that_the_terminal_does_not_have(files: Path, environment: dict[str, str], line: str) -> None:
    """θ, →, ± and tokens of any script must not end a command, and numbers do not depend on the locale."""
    names = {"gpt2": files / "gpt2", "result": files / "result.safetensors", "labels": files / "labels.csv"}
    (files / "labels.csv").write_text("head,label\nL0H0,ä\nL0H1,ä\nL1H0,→\nL1H1,→\n", encoding="utf-8")
    save_labelled_result(files)
    done = in_a_new_process(*(part.format(**names) for part in line.split()), **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "0." in done.stdout


def save_labelled_result(files: Path) -> None:
    import headspan as hs

    hs.score(hs.open(files / "gpt2"), "pk", "all").save(files / "result.safetensors")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_to_a_full_disk(files: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "headspan", "top", str(files / "result.safetensors"), "--pairing", "OK", *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert_refused((done.returncode, "", done.stderr), "No space left on device")


def test_closed_output_gives_no_traceback(files: Path) -> None:
    line = f"'{sys.executable}' -m headspan top '{files / 'result.safetensors'}' --pairing OK --json"
    for redirection in (">&-", "2>&-", "| true"):
        done = subprocess.run(["sh", "-c", f"{line} {redirection}"], capture_output=True, text=True)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_by_hand_is_one_line(files: Path, cache: Path, number: signal.Signals) -> None:
    """Ctrl-C or kill in the middle of a run: exit code 128 + signal, no result, no traceback, nothing left."""
    rng, (d, layers) = np.random.default_rng(0), (128, 12)
    tensors = {f"h.{n}.attn.c_attn.weight": rng.normal(size=(d, 3 * d)).astype(np.float32) for n in range(layers)}
    tensors |= {f"h.{n}.attn.c_proj.weight": rng.normal(size=(d, d)).astype(np.float32) for n in range(layers)}
    save_file(tensors, files / "gpt2" / "model.safetensors")
    change_config(files / "gpt2", n_embd=d, n_layer=layers, n_head=32)
    out = files / "made" / "scores.safetensors"
    command = [
        sys.executable,
        "-m",
        "headspan",
        "score",
        str(files / "gpt2"),
        "--out",
        str(out),
        "--metric",
        "procrustes",
    ]

    def listen() -> None:  # a shell's background job, as CI may be, starts with Ctrl-C ignored
        signal.signal(number, signal.SIG_DFL)

    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=listen) as process:
        while process.poll() is None and not list(cache.rglob("*.safetensors")):
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == 128 + number
    assert err.startswith("headspan: stopped. Finished work is kept") and len(err.splitlines()) == 1
    assert not out.parent.exists() and not [path for path in cache.rglob("*") if path.name.endswith(".tmp")]


HEAVY = ["torch", "transformers", "scipy.stats", "sklearn", "matplotlib", "pandas", "networkx", "xarray", "distributed",
         "gguf", "huggingface_hub", "tokenizers", "jinja2"]  # fmt: skip


@pytest.mark.parametrize(
    "code", ["import headspan", "sys.argv = ['headspan', '--help']; from headspan.cli import main; main()"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_needs_no_numpy() -> None:
    script = "import sys\nsys.argv = ['headspan', '--help']\nfrom headspan.cli import main\n"
    script += "try:\n    main()\nexcept SystemExit: pass\nprint('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def registered() -> list[str]:
    import typer.main

    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_all_commands_are_in_this_test() -> None:
    assert registered() == sorted(COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_shows_an_example_and_is_documented(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"headspan {command} " in out.split("Usage:")[1].partition("\n")[2]  # in the text, not in the usage line
    assert f"headspan {command}" in (DOCS / "cli.md").read_text(encoding="utf-8")


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert all(command in out for command in COMMANDS)
