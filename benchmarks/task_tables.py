"""The tables of docs/tasks.md from the files of task_evidence.py.

python benchmarks/task_tables.py OUT.json …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_tables import NAMES

ALL = ("EAP-IG", "EAP", "random")
BETWEEN = (
    "EAP-IG", "EAP", "pk × |EAP|", "placebo × |EAP|", "influence × |EAP|", "pk", "cs", "influence", "random",
)  # fmt: skip
PAIRINGS = ("OQ", "OK", "OV")
METRICS = ("pk", "cs", "simple_cs", "linear_cka", "procrustes", "influence")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    print()


def span(estimate: dict[str, float], digits: int = 2, sign: str = "") -> str:
    mean = estimate["mean"] if "mean" in estimate else estimate["value"]
    return f"{mean:{sign}.{digits}f} ({estimate['low']:{sign}.{digits}f}…{estimate['high']:{sign}.{digits}f})"


def named(found: dict[str, Any]) -> str:
    if found["task"] == "gpt2-ioi":
        return "GPT-2 small, published classes"
    return f"{NAMES.get(Path(found['model']).name, found['model'])}, {found['task']}"


def curves(results: list[dict[str, Any]]) -> None:
    of = [one for one in results if "all edges" in one]
    print("All edges\n")
    rows = []
    for one in of:
        cells = [f"{one['all edges'][name][area]:.3f}" for area in ("cmd", "cpr") for name in ALL]
        rows.append([named(one), str(one["prompts"]), f"{one['solved']:.0%}", *cells])
    table(["model, task", "prompts", "solved", *(f"{area} {name}" for area in ("CMD", "CPR") for name in ALL)], rows)
    of = [one for one in of if "edges between heads" in one]
    for area in ("cmd", "cpr"):
        print(f"Edges between heads, {area.upper()}\n")
        rows = []
        for one in of:
            cells = [f"{one['edges between heads'][name][area]:.3f}" for name in BETWEEN]
            rows.append([named(one), f"{one['without edges between heads']:.2f}", *cells])
        table(["model, task", "rest", *BETWEEN], rows)


def few(results: list[dict[str, Any]]) -> None:
    print("Five prompts\n")
    names = ("EAP-IG", "pk × |EAP-IG|", "placebo × |EAP-IG|")
    rows = []
    for one in (one for one in results if "few" in one):
        for measure in ("faithfulness", "jaccard"):
            found = one["few"]
            means = [f"{found['mean'][measure][name]['mean']:.2f}" for name in names]
            gains = [span(found["gain over"][name][measure], 3, "+") for name in (names[0], names[2])]
            rows.append([named(one), measure, *means, *gains])
    table(["model, task", "measure", *names, "pk over no prior", "pk over placebo"], rows)


def classes(results: list[dict[str, Any]]) -> None:
    print("Detection\n")
    rows, by_pairing = [], []
    for one in results:
        for row in one.get("classes", []):
            size = f"{row['edges']:,} ({row['faithfulness']:.2f})" if "edges" in row else "–"
            heads = f"{row['heads']} of {row['of']}"
            precision = [f"{row['areas'][name]['average_precision']['average']['value']:.2f}" for name in ("pk", "cs")]
            rows.append([named(one), size, heads, *detected(row, "average"), *precision])
            if row.get("edges", 200) == 200 and "ioi" in one["task"]:
                by_pairing += [[named(one), pairing, *detected(row, pairing)] for pairing in PAIRINGS]
    head = [*METRICS, "chance", "pk − cs"]
    table(["model, task", "edges (f)", "heads", *head, "ap pk", "ap cs"], rows)
    table(["model, task", "pairing", *head], by_pairing)


def detected(row: dict[str, Any], pairing: str) -> list[str]:
    areas = {name: of["pr_auc"][pairing] for name, of in row["areas"].items()}
    cells = [f"{areas[name]['value']:.2f}" if name in areas else "–" for name in METRICS]
    return [*cells, f"{areas['pk']['chance']:.2f}", span(row["pk - cs"][pairing])]


def overlaps(results: list[dict[str, Any]]) -> None:
    print("Verified edges between heads in the top 1 %\n")
    rows = []
    for one in (one for one in results if "overlap" in one):
        found = {row["similarity"]: row for row in one["overlap"]}
        cells = [str(found[name]["in_top_1%"]) for name in METRICS[:5]]
        rows.append([named(one), str(found["pk"]["edges"]), *cells, f"{found['pk']['by_chance']:.1f}"])
    table(["model, task", "edges", *METRICS[:5], "by chance"], rows)


def main() -> None:
    results = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    for part in (curves, few, classes, overlaps):
        part(results)


if __name__ == "__main__":
    main()
