"""Influence as people use it: `headspan observe`, `score`, `top` and `effects`, result files, nodes and pages."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import headspan as hs
from headspan.cli import main
from headspan.models.folding import fold
from headspan.results.observations import Statistics
from headspan.vocabulary.errors import HeadspanError, HeadspanWarning
from notices import noticed
from report_browser import Open

pytest.importorskip("torch")
pytest.importorskip("transformers")

Run = Callable[..., tuple[int, str, str]]
QUICK = ["--random", "--sequences", "4", "--length", "12"]
IDS = [[5, 10, 15, 20, 9], [7, 3, 44, 3, 2], [9, 21, 33, 8, 1]]
FOLDS = "influence folds the norms into the weights"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headspan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return (code if isinstance(code, int) else 0, *capfd.readouterr())

    return call


def refused(outcome: tuple[int, str, str], words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and err.startswith("headspan: ") and words in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """random.safetensors and tokens.safetensors: statistics of the demo. r.safetensors: pk and influence."""
    found = tmp_path_factory.mktemp("influence")
    with noticed():
        hs.observe("demo", random=True, sequences=4, length=12, out=found / "random.safetensors")
    hs.observe("demo", tokens=IDS, out=found / "tokens.safetensors")
    hs.score("demo", "pk,influence", "flow", stats=found / "random.safetensors", out=found / "r.safetensors")
    return found


@pytest.fixture(scope="module")
def stats(folder: Path) -> Statistics:
    return Statistics.load(folder / "random.safetensors")


@pytest.fixture(scope="module")
def result(folder: Path) -> hs.Scores:
    return hs.Scores.load(folder / "r.safetensors")


def same(first: hs.Scores, second: hs.Scores) -> None:
    assert set(first.arrays) == set(second.arrays) and set(first.sizes) == set(second.sizes)
    for name in ("arrays", "sizes"):
        for key, values in getattr(first, name).items():
            np.testing.assert_array_equal(values, getattr(second, name)[key])


# -- headspan observe ---------------------------------------------------------------------------------------------


def test_observe_on_random_sequences(run: Run, tmp_path: Path, stats: Statistics) -> None:
    code, out, err = run("observe", "demo", *QUICK, "--out", tmp_path / "s.safetensors")
    assert (code, out) == (0, "")
    told = f"{tmp_path / 's.safetensors'}: statistics of 16 heads on 96 tokens of random sequences"
    assert err.splitlines()[-1] == told
    found = Statistics.load(tmp_path / "s.safetensors")
    assert found.inputs == stats.inputs
    for name, values in stats.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], values)


def test_observe_on_text_files(run: Run, tmp_path: Path) -> None:
    texts = ["one two three four five six seven. " * 12, "seven six five four three two one. " * 12]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    words = ["--text", tmp_path / "0.txt", "--text", tmp_path / "1.txt"]
    code, out, err = run("observe", "demo", *words, "--out", tmp_path / "s.safetensors")
    assert (code, out) == (0, ""), err
    found, expected = Statistics.load(tmp_path / "s.safetensors"), hs.observe("demo", text=texts)
    assert found.kind == "text" and found.inputs == expected.inputs
    assert err.endswith(f"on {found.tokens:,} tokens of text\n")


@pytest.mark.parametrize("ending", ["json", "npy"])
def test_observe_on_token_ids(run: Run, tmp_path: Path, folder: Path, ending: str) -> None:
    path = tmp_path / f"ids.{ending}"
    if ending == "npy":
        np.save(path, np.array(IDS))
    else:
        path.write_text(json.dumps(IDS))
    code, _, err = run("observe", "demo", "--tokens", path, "--out", tmp_path / "s.safetensors")
    assert code == 0 and err.endswith("statistics of 16 heads on 15 tokens of the given sequences\n")
    found, expected = Statistics.load(tmp_path / "s.safetensors"), Statistics.load(folder / "tokens.safetensors")
    np.testing.assert_array_equal(found.arrays["fisher/K"], expected.arrays["fisher/K"])


BAD_IDS = {
    "a.json": b"[[1, 2], [3, 4.5]]",
    "b.json": b'{"ids": [1, 2]}',
    "c.json": b"[]",
    "d.json": b"[[1, 2], [3",
    "e.json": b'[["one", "two"], ["three", "four"]]',
    "f.json": b"[" * 100_000,
    "g.json": b"[[[1, 2]], [[3, 4]]]",
    "h.json": b"[[true, false], [true, true]]",
    "i.npy": b"\x93NUMPY",
    "j.npy": b"",
    "k.json": b"\xff\xfe",
    "l.json": b"7",
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_files_without_token_ids_are_refused(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BAD_IDS[name])
    refused(run("observe", "demo", "--tokens", tmp_path / name, "--out", tmp_path / "s.safetensors"), name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "{folder}/none.json"], "there is no file"),
        (["--tokens", "{ids}", "--random"], "exclude each other"),
        (["--tokens", "{ids}", "--text", "{text}"], "exclude each other"),
        (["--random", "--text", "{text}"], "exclude each other"),
        (["--tokens", "{far}"], "ids from 0 to"),
        (["--tokens", "{one}"], "at least two"),
        (["--tokens", "{ids}", "--sequences", "3"], "--sequences"),
        (["--text", "{folder}/none.txt"], "there is no file"),
        (["--random", "--dtype", "float8"], "float8"),
        (["--random", "--out", "{folder}/s.json"], ".safetensors"),
        (["--random", "--out", "{folder}/s"], ".safetensors"),
        (["--tokens", "{same}", "--out", "{same}"], "same.safetensors"),
        (["--random", "--out", "{theirs}"], "theirs.safetensors"),
    ],
)
def test_observe_refuses_in_one_line_and_writes_nothing(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    names = {"folder": tmp_path}
    for name, content in {
        "ids.json": json.dumps(IDS), "far.json": "[[1, 2], [3, 99999999]]", "one.json": "[[1, 2, 3]]",
        "text.txt": "a b c", "same.safetensors": json.dumps(IDS), "theirs.safetensors": "not ours",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(content)
        names[name.partition(".")[0]] = tmp_path / name
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = [] if "--out" in words else ["--out", tmp_path / "new.safetensors"]
    refused(run("observe", "demo", *(word.format(**names) for word in words), *out), said)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- headspan score -----------------------------------------------------------------------------------------------


def test_score_with_statistics(run: Run, tmp_path: Path, folder: Path, result: hs.Scores) -> None:
    words = ["score", "demo", "--metric", "pk,influence", "--pairing", "flow", "--stats", folder / "random.safetensors"]
    code, out, err = run(*words, "--out", tmp_path / "r.safetensors")
    assert (code, out) == (0, "") and err.count(FOLDS) == 1
    assert err.endswith("pk, influence for 3 pairings, 384 scores\n")
    same(hs.load(tmp_path / "r.safetensors"), result)
    code, _, err = run(*words, "--fold", "--out", tmp_path / "folded.safetensors")
    assert code == 0 and FOLDS not in err
    folded = hs.load(tmp_path / "folded.safetensors")
    for pairing in ("OQ", "OK", "OV"):
        np.testing.assert_array_equal(folded["influence", pairing].values, result["influence", pairing].values)
        assert not np.array_equal(folded["pk", pairing].values, result["pk", pairing].values, equal_nan=True)


def test_score_may_observe_by_itself(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five six seven. " * 40
    monkeypatch.setattr("headspan.running.observe.built_in_text", lambda name: text)
    words = ["score", "demo", "--metric", "influence", "--pairing", "OK", "--observe"]
    code, _, err = run(*words, "--out", tmp_path / "r.safetensors")
    assert code == 0, err
    same(hs.load(tmp_path / "r.safetensors"), hs.score("demo", "influence", "OK", stats=hs.observe("demo", text=text)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--metric influence --stats {stats} --observe", "--stats and --observe exclude each other"),
        ("--metric pk --stats {stats}", "pk use no statistics. Add influence to --metric, or leave out --stats"),
        ("--metric pk,cs --observe", "pk, cs use no statistics. Add influence to --metric, or leave out --observe"),
        ("--metric influence", "influence needs statistics of a run"),
        ("--metric influence --stats {folder}/none.safetensors", "there is no file"),
        ("--metric influence --stats {folder}/r.safetensors", "r.safetensors"),
    ],
)
def test_score_refuses(run: Run, folder: Path, tmp_path: Path, words: str, said: str) -> None:
    given = words.format(stats=folder / "random.safetensors", folder=folder).split()
    code, out, err = run("score", "demo", *given, "--out", tmp_path / "r.safetensors")
    assert (code, out) == (2, "") and said in err.splitlines()[-1] and "`" not in err
    assert list(tmp_path.iterdir()) == []


def test_other_pairings_are_refused_with_the_reason(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["--metric", "influence", "--pairing", "QK", "--stats", folder / "random.safetensors"]
    code, _, err = run("score", "demo", *words, "--out", tmp_path / "r.safetensors")
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert err.splitlines()[-1].startswith("headspan: influence is not defined for QK: ")
    assert err.endswith("Choose from OQ, OK, OV\n")


def test_all_similarities_include_influence_with_statistics_only(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["score", "demo", "--metric", "all", "--pairing", "OK"]
    for name, more in {"a": ["--stats", folder / "random.safetensors"], "b": []}.items():
        assert run(*words, *more, "--out", tmp_path / f"{name}.safetensors")[0] == 0
    having, without = (hs.load(tmp_path / f"{name}.safetensors").metrics for name in "ab")
    assert list(having) == [*without, "influence"]


# -- headspan top -------------------------------------------------------------------------------------------------


def expected(result: hs.Scores, pairing: str) -> np.ndarray:
    """By hand: folded norms subtract the mean, which leaves d − 1 dimensions."""
    assert result.provenance["statistics"]["centred"] and result.d_model == 256
    first, second = (result.sizes["influence", hs.Role(role)].astype(float) for role in pairing)
    return np.outer(first, second) / np.sqrt(255)


def test_top_has_units_and_no_z(run: Run, folder: Path, result: hs.Scores) -> None:
    rows = json.loads(run("top", folder / "r.safetensors", "--metric", "influence", "-k", 5, "--json")[1])
    assert len(rows) == 15
    columns = ["metric", "pairing", "rank", "source", "target", "score", "expected", "ratio", "amount", "unit"]
    for row in rows:
        assert list(row) == columns
        matrix = result["influence", row["pairing"]]
        place = matrix.find(row["source"], row["target"])
        assert row["score"] == matrix.values[place]
        assert row["amount"] == pytest.approx(row["score"] ** 2, rel=1e-12)
        assert row["expected"] == pytest.approx(expected(result, row["pairing"])[place], rel=1e-6)
        assert row["ratio"] == pytest.approx(row["score"] / row["expected"], rel=1e-12)
        assert row["unit"] == ("share" if row["pairing"] == "OV" else "nats")
    for pairing in ("OQ", "OK", "OV"):
        scores = [row["score"] for row in rows if row["pairing"] == pairing]
        assert scores == sorted(result["influence", pairing].pairs()[2].tolist(), reverse=True)[:5]


def test_top_beside_another_similarity(run: Run, folder: Path) -> None:
    rows = json.loads(run("top", folder / "r.safetensors", "--metric", "pk,influence", "-k", 2, "--json")[1])
    for row in rows:
        observed = row["metric"] == "influence"
        assert (row["z"] is None) == observed and (row["unit"] is not None) == observed


def test_the_table_of_influence_fits_80_columns(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("top", folder / "r.safetensors", "--metric", "influence", "-k", 3)
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80 and "…" not in out
    assert lines[1].split() == "pairing rank source target score expected ratio amount unit".split()
    assert len(lines) > 12 and lines[12].startswith("Influence on 96 tokens of random sequences.")
    assert "Influence on" not in run("top", folder / "r.safetensors", "-k", 3)[1]
