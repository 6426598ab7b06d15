"""Shipped labels agree with the paper; user files are read, or refused with one message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import headspan as hs
from headspan.cli import _run
from headspan.paper.reproduction import published
from headspan.results.labels import SHIPPED, Labels
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head
from headspan.vocabulary.ports import PortTable

GPT2 = PortTable.regular(range(12), 12, 12)


def test_the_ioi_labels_are_the_published_classes() -> None:
    labels = Labels.load("gpt2-ioi")
    classes = published()["head_classes"]
    assert labels.names == tuple(classes)
    for name, entry in classes.items():
        assert [str(h) for h in labels.heads(name)] == sorted(entry["heads"], key=lambda h: Head.parse(h))
        assert len(labels.heads(name)) == entry["count"]
    assert len(labels) == 36


def test_the_identity_labels_are_the_ten_published_heads() -> None:
    expected = {head for head, _ in published()["head_scores_top10"]["identity"]}
    assert {str(h) for h in Labels.load("gpt2-identity").heads("identity")} == expected


def test_the_combined_labels_keep_several_classes_of_a_head() -> None:
    labels = Labels.load("gpt2")
    assert labels.of("L0H1") == ("duplicate_token", "identity")
    assert labels.of("L4H7") == ("identity",)
    assert labels.of("L11H11") == ()
    assert "L4H7" in labels
    assert len(labels.names) == 8


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_labels_fit_gpt2_small_and_say_where_they_come_from(name: str) -> None:
    assert Labels.load(name).for_model(GPT2).names
    for file in SHIPPED[name]:
        text = (Path(__file__).parents[1] / "src/headspan/data/labels" / f"{file}.csv").read_text()
        assert text.startswith("# ")
        assert "paper" in text.split("head,label")[0]


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('\ufeff# mine\nHead,Label\nl5h5, induction\n\nL5H5,strong\nL5H5,strong\nL0H1,"copy, or so"\n')
    labels = Labels.load(path)
    assert labels.of("L5H5") == ("induction", "strong")
    assert labels.heads("copy, or so") == (Head(0, 1),)
    assert labels.source == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "head,label but is empty"),
        ("L5H5,induction\n", "begins with L5H5,induction"),
        ("head,label\n", "has no labels"),
        ("head,label\nL5H5\n", "line 2 of .* a head and a label"),
        ("head,label\nL5H5,\n", "line 2 of .* a head and a label"),
        ("head,label\nL5H5,a,b\n", "line 2 of"),
        ("# note\nhead,label\nfive,induction\n", "line 3 of .*'five' is not a head name"),
    ],
)
def test_malformed_files_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(HeadspanError, match=message):
        Labels.load(path)


def test_a_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(HeadspanError, match=r"bad\.csv cannot be read"):
        Labels.load(path)
    with pytest.raises(HeadspanError, match="gpt2-ioi, gpt2-identity, gpt2"):
        Labels.load("gpt3-ioi")


def test_a_result_without_labels_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scores = hs.score("demo", "pk", "OK")
    path, edges = tmp_path / "s.safetensors", tmp_path / "e.safetensors"
    scores.save(path)
    hs.top(scores, "OK", labels=Labels.from_pairs([("L1H2", "a")])).save(edges)
    for saved in (path, edges):  # edges have the labels of their own heads, which are not a list of labels
        with pytest.raises(HeadspanError, match="has no labels"):
            Labels.load(saved)
    with pytest.raises(HeadspanError, match=r"no labels 'task.safetensors': .* result of a task"):
        Labels.load("task.safetensors")
    tensors = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(2)}, tensors)
    with pytest.raises(HeadspanError, match="not a headspan result"):
        Labels.load(tensors)
    for command in (["top", str(path)], ["wiring", str(path)], ["evaluate", str(path)], ["hubs", str(path)]):
        assert _run([*command, "--labels", str(path)]) == 2
        assert f"{path} has no labels" in capfd.readouterr().err


def test_unknown_heads_are_named() -> None:
    labels = Labels.from_pairs([("L0H1", "a"), ("L12H0", "a"), ("L3H99", "b")])
    with pytest.raises(HeadspanError, match=r"L3H99, L12H0.*L0H0.*L11H11"):
        labels.for_model(GPT2)
    with pytest.raises(HeadspanError, match=r"no class 'c' .* they have a, b"):
        labels.heads("c")


def test_a_shared_kv_head_takes_over_the_classes_of_its_group() -> None:
    table = PortTable.regular(range(2), 6, 2)  # query heads 0–2 share KV0, 3–5 share KV1
    labels = Labels.from_pairs([("L0H2", "a"), ("L0H3", "b"), ("L1KV0", "c"), ("L1H1", "d")]).for_model(table)
    assert labels.of("L0KV0") == ("a",)
    assert labels.of("L0KV1") == ("b",)
    assert labels.of("L1KV0") == ("c", "d")
    assert labels.of("L1KV1") == ()
    assert labels.of("L0H3") == ("b",)
