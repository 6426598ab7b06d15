"""Every published number is in the data file where it is in the paper: table, row and column.

The paper's source is read from the folder in HEADSPAN_PAPER_DIR. Three sections were read off figures, which it does
not contain; for these, only statements in the text are checked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headspan.paper.reproduction import published

METRICS = {"PK": "pk", "CS": "cs", "Simple-CS": "simple_cs", "Linear CKA": "linear_cka", "Proc. Sim.": "procrustes"}
METRICS |= {"Procrustes": "procrustes"}
CLASSES = {
    "Dup": "duplicate_token", "Prev": "previous_token", "Ind": "induction", "NM": "name_mover",
    "N-NM": "negative_name_mover", "B-NM": "backup_name_mover", "S-Inh": "s_inhibition", "Avg": "average",
}  # fmt: skip
AREAS = {"PR-AUC": "pr_auc", "ROC-AUC": "roc_auc"}
FROM_FIGURES = {"kl_random_vs_observed", "pk_mean", "top20_wiring_head_counts"}


@pytest.fixture(scope="module")
def paper(paper_dir: Path) -> str:
    return (paper_dir / "paper.tex").read_text(encoding="utf-8")


def table(paper: str, label: str) -> list[list[str]]:
    """The cells of the last tabular before a label, without mark-up; the first row is the head of the table."""
    before = paper[: paper.index(rf"\label{{{label}}}")]
    start, stop = before.rindex(r"\begin{tabular}"), before.rindex(r"\end{tabular}")
    assert start < stop
    body = before[start:stop].split(r"\toprule", 1)[1]
    rows = [row for row in re.sub(r"\\(midrule|bottomrule)", "", body).split(r"\\") if row.strip()]
    return [[plain(cell) for cell in row.split("&")] for row in rows]


def plain(cell: str) -> str:
    cell = re.sub(r"\\multirow\{\d+\}\{\*\}", "", cell)
    cell = re.sub(r"\$\^\{\\text\{[^}]*\}\}\$|\\rotatebox\{90\}", "", cell)  # class labels beside heads
    cell = re.sub(r"\\(textbf|underline)", "", cell)
    return re.sub(r"[{}]", "", cell).strip()


def leaves(tree: Any) -> int:
    """How many numbers a section holds."""
    if isinstance(tree, dict):
        return sum(map(leaves, tree.values()))
    if isinstance(tree, list):
        return sum(map(leaves, tree))
    return int(isinstance(tree, (int, float)))


def columns(head: list[str], names: dict[str, str] | None = None) -> list[str]:
    """The names of the columns of numbers, as the data file has them."""
    found = [re.sub(r"\s*\(\d+\)|\.$", "", cell) for cell in head[head.index("Method") + 1 :]]
    return [(names or {}).get(name, name) for name in found]


def test_detection(paper: str) -> None:
    head, *rows = table(paper, "tab:PRAUC-OQ-OK-OV")
    names = columns(head, {"Avg": "average"})
    found = {METRICS[row[1]]: dict(zip(names, map(float, row[2:]), strict=True)) for row in rows}
    assert found == published()["detection_pr_auc"]


def test_classification_summary(paper: str) -> None:
    head, *rows = table(paper, "tab:classification-summary")
    names = columns(head, AREAS)
    found = {METRICS[row[0]]: dict(zip(names, map(float, row[1:]), strict=True)) for row in rows}
    assert found == published()["classification_summary"]


def groups(paper: str, label: str) -> dict[str, Any]:
    """A table of classes with a group of rows for each pairing or area: group -> similarity -> class -> number."""
    head, *rows = table(paper, label)
    names, found, group = columns(head, CLASSES), {}, ""
    for row in rows:
        group = row[0] or group
        found.setdefault(group, {})[METRICS[row[1]]] = dict(zip(names, map(float, row[2:]), strict=True))
    return found


def test_classification_by_class_and_pairing(paper: str) -> None:
    found = groups(paper, "tab:classification")
    assert {AREAS[area]: numbers for area, numbers in found.items()} == published()["classification_by_class"]
    labels = {"pr_auc": "tab:classification_appendix_pr_auc", "roc_auc": "tab:classification_appendix_auc"}
    by_pairing = {area: groups(paper, label) for area, label in labels.items()}
    assert by_pairing == published()["classification_by_pairing"]


@pytest.mark.parametrize("kind", ["inlet", "outlet"])
def test_hubs(paper: str, kind: str) -> None:
    head, *rows = table(paper, f"tab:{kind}_appendix")
    pairings = re.findall(r"O[QKV]", " ".join(head))
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 11)]
    found = {
        pairing: [[row[1 + 2 * i].split(" (")[0], float(row[2 + 2 * i])] for row in rows]
        for i, pairing in enumerate(pairings)
    }
    assert found == published()[f"{kind}_top10"]
    _, *short = table(paper, "tab:inlet_outlet_identity")
    own = short[:3] if kind == "inlet" else short[3:]
    assert {row[1]: row[2:] for row in own} == {name: [head for head, _ in found[name][:5]] for name in found}


def test_head_scores(paper: str) -> None:
    labels = {"identity": "identity", "duplicate_token": "duplicate", "previous_token": "previous"}
    labels["induction"] = "induction"
    found = {kind: [[h, float(x)] for h, x in table(paper, f"tab:{label}")[1:]] for kind, label in labels.items()}
    assert found == published()["head_scores_top10"]


def test_norm_correlations(paper: str) -> None:
    head, *rows = table(paper, "tab:norms-vs-projected-norms")
    roles = [{"All": "all"}.get(name, name[0]) for name in head[2:]]
    assert roles == ["Q", "K", "V", "O", "all"]
    found = [
        {role: [float(x) for x in cell.strip("$").split(r"\pm")] for role, cell in zip(roles, row[2:], strict=True)}
        for row in rows
    ]
    kinds = [("-" in row[0], "/" in row[0]) for row in rows]  # the mean is subtracted, the length divided by
    names = {(False, False): "identity", (True, False): "centre", (False, True): "normalise"}
    names[True, True] = "centre_normalise"
    assert {names[kind]: line for kind, line in zip(kinds, found, strict=True)} == published()[
        "unembedding_norm_spearman"
    ]


def test_head_classes(paper: str) -> None:
    found = {}
    for name, count, heads in table(paper, "tab:head-class")[1:]:
        listed = [head.strip() for head in heads.split(",")]
        key = name.removesuffix(" Heads").lower().replace(" ", "_").replace("-", "_")
        added = [head.removesuffix("$^*$") for head in listed if head.endswith("$^*$")]
        listed = [head.removesuffix("$^*$") for head in listed]
        found[key] = {"count": int(count), "heads": listed, "added_by_paper": added}
    assert found == published()["head_classes"]


def test_numbers_in_the_text(paper: str) -> None:
    """Found by the numbers' neighbours: which of them is which follows from the order in one statement."""
    order = "OQ", "OK", "OV"
    everywhere = re.search(r"all pairs are \$(\S+)\$, \$(\S+)\$, and \$(\S+)\$", paper)
    at_the_top = re.search(r"drop to \$(\S+)\$, \$(\S+)\$, and \$(\S+)\$", paper)
    assert everywhere and at_the_top
    assert published()["pk_vs_cs_spearman"] == {
        name: dict(zip(order, map(float, match.groups()), strict=True))
        for name, match in (("all", everywhere), ("top3pct_of_either", at_the_top))
    }
    shared = re.findall(r"shared \((\d+) for OQ, (\d+) for OK, and (\d+) for OV\)", paper)
    counts = [dict(zip(order, map(int, numbers), strict=True)) for numbers in shared]
    assert dict(zip(("pk", "cs"), counts, strict=True)) == published()["top20_edges_shared_after_preprocessing"]
    mean, beta = r"\bar{\bm{e}}", r"\bm{\beta}_{\text{final}}"
    said = {
        "e_with_mean": rf"\cos(\bm{{e}}_t,{mean})$, is $",
        "e_with_beta_final": rf"\cos(\bm{{e}}_t,{beta})$, is $",
        "mean_with_beta_final": rf"\cos({mean},{beta})=",
    }
    found = {name: re.search(re.escape(text) + r"(-?[\d.]+)\$", paper) for name, text in said.items()}
    cosines = {name: float(match[1]) for name, match in found.items() if match}
    assert cosines == published()["unembedding_mean_cosines"]


def test_numbers_read_off_figures_agree_with_the_text(paper: str) -> None:
    kl = published()["kl_random_vs_observed"]
    assert re.search(r"QQ\b.{0,30} maximum\b.{0,20}\bVO\b.{0,30} minimum", paper)
    assert (max(kl, key=kl.get), min(kl, key=kl.get)) == ("QQ", "VO") and len(kl) == 16
    means = published()["pk_mean"]
    assert means["random"] == round(64 * 64 / 768, 3) and means["QQ"] > means["VO"] > means["random"]


def test_every_section_is_looked_at() -> None:
    checked = {
        "detection_pr_auc": 20, "classification_summary": 10, "classification_by_class": 80,
        "classification_by_pairing": 320, "inlet_top10": 30, "outlet_top10": 30, "head_scores_top10": 40,
        "unembedding_norm_spearman": 40, "pk_vs_cs_spearman": 6, "top20_edges_shared_after_preprocessing": 6,
        "unembedding_mean_cosines": 3,
    }  # fmt: skip
    assert {name: leaves(published()[name]) for name in checked} == checked
    assert set(published()) == set(checked) | FROM_FIGURES | {"head_classes"}
    assert sum(leaves(published()[name]) for name in FROM_FIGURES) == 23
