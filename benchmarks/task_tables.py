"""The tables of docs/tasks.md from the files of task_evidence.py.

python benchmarks/task_tables.py OUT.json …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from evidence_tables import NAMES

ALL = ("EAP-IG", "EAP", "random")
BETWEEN = (
    "EAP-IG", "EAP", "pk × |EAP|", "placebo × |EAP|", "influence × |EAP|", "pk", "cs", "influence", "random",
)  # fmt: skip
PAIRINGS = ("OQ", "OK", "OV", "average")


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def span(estimate: dict[str, float], digits: int = 2, sign: str = "") -> str:
    mean = estimate["mean"] if "mean" in estimate else estimate["value"]
    return f"{mean:{sign}.{digits}f} ({estimate['low']:{sign}.{digits}f}…{estimate['high']:{sign}.{digits}f})"


def named(found: dict[str, Any]) -> str:
    model = found["model"]
    return f"{NAMES.get(Path(model).name, model).removeprefix('The ')}, {found['task']}"


def curves(results: list[dict[str, Any]]) -> None:
    of = [one for one in results if "all edges" in one]
    print("All edges\n")
    head = ["model, task", "prompts", "solved", *(f"CMD {name}" for name in ALL), *(f"CPR {name}" for name in ALL)]
    rows = []
    for one in of:
        cells = [f"{one['all edges'][name][area]:.3f}" for area in ("cmd", "cpr") for name in ALL]
        rows.append([named(one), str(one["prompts"]), f"{one['solved']:.0%}", *cells])
    table(head, rows)
    for area in ("cmd", "cpr"):
        print(f"Edges between heads, {area.upper()}\n")
        rows = [
            [named(one), *(f"{one['edges between heads'][name][area]:.3f}" for name in BETWEEN)]
            for one in of
            if "edges between heads" in one
        ]
        table(["model, task", *BETWEEN], rows)


def few(results: list[dict[str, Any]]) -> None:
    print("Five prompts\n")
    names = ("EAP-IG", "pk × |EAP-IG|", "placebo × |EAP-IG|")
    for measure in ("faithfulness", "jaccard"):
        rows = []
        for one in results:
            if (found := one.get("few")) is None:
                continue
            means = [span(found["mean"][measure][name]) for name in names]
            gains = [span(found["gain over"][name][measure], 3, "+") for name in (names[0], names[2])]
            rows.append([named(one), str(found["draws"]), *means, *gains])
        print(measure)
        table(["model, task", "draws", *names, "pk over none", "pk over placebo"], rows)


def classes(results: list[dict[str, Any]]) -> None:
    print("Detection\n")
    metrics = ("pk", "cs", "simple_cs", "linear_cka", "procrustes", "influence")
    rows = []
    for one in results:
        for row in one.get("classes", []):
            of = row["areas"]
            areas = [f"{of[name]['pr_auc']['average']['value']:.2f}" if name in of else "–" for name in metrics]
            size = f"{row['edges']:,} ({row['faithfulness']:.2f})" if "edges" in row else "–"
            heads = f"{row['heads']} of {row['of']}"
            chance = f"{of['pk']['pr_auc']['average']['chance']:.2f}"
            precision = f"{of['pk']['average_precision']['average']['value']:.2f}"
            other = f"{of['cs']['average_precision']['average']['value']:.2f}"
            rows.append([named(one), size, heads, *areas, chance, span(row["pk - cs"]["average"]), precision, other])
    head = ["model, task", "edges (f)", "heads", *metrics, "chance", "pk − cs", "ap of pk", "ap of cs"]
    table(head, rows)
    for one in results:
        for row in one.get("classes", []):
            print(named(one), row.get("edges", ""))
            cells = [
                [name, *(f"{row['areas'][name]['pr_auc'][p]['value']:.2f}" for p in PAIRINGS)] for name in row["areas"]
            ]
            cells.append(["chance", *(f"{row['areas']['pk']['pr_auc'][p]['chance']:.2f}" for p in PAIRINGS)])
            cells.append(["pk − cs", *(span(row["pk - cs"][p]) for p in PAIRINGS)])
            table(["", *PAIRINGS], cells)


def overlaps(results: list[dict[str, Any]]) -> None:
    print("Verified edges between heads in the top 1 %\n")
    rows = [
        [named(one), *(f"{row['in_top_1%']} of {row['edges']}" for row in one["overlap"][:2])]
        for one in results
        if "overlap" in one
    ]
    table(["model, task", "pk", "cs"], rows)


def main() -> None:
    results = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    for part in (curves, few, classes, overlaps):
        part(results)


if __name__ == "__main__":
    main()
