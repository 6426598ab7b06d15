"""The short tables of docs/evidence.md, one per question, from the files of benchmarks/evidence.py.

python benchmarks/evidence_tables.py out/evidence/*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAIRINGS = ("OQ", "OK", "OV")
OVERLAPS = ("pk raw", "pk folded", "cs raw", "cs folded")
SIZES = ("1e-12", "0.0001", "0.001", "0.01", "0.1")
LABELS = ("below 10⁻⁴", "10⁻⁴ to 10⁻³", "10⁻³ to 10⁻²", "10⁻² to 10⁻¹", "above 10⁻¹")
NAMES = {
    "stories260k": "stories260K",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2",
    "gemma-3-270m-q4_k_m.gguf": "Gemma-3",
    "qwen2.5-coder-0.5b.gguf": "Qwen2.5-Coder-0.5B",
}


class Run:
    """One file: the rows of a model."""

    def __init__(self, path: Path) -> None:
        self.found: dict[str, Any] = json.loads(path.read_text())
        self.name = NAMES.get(self.found["model"], self.found["model"])
        self.rows = {(row["material"], row["pairing"], row["predictor"]): row for row in self.found["rows"]}
        self.materials = sorted(self.found["tokens"]["effects"])

    def cell(self, material: str, pairing: str, predictor: str, measure: str, interval: bool = False) -> str:
        row = self.rows[material, pairing, predictor]
        if not interval or row[measure] is None:
            return number(row[measure])
        return f"{row[measure]:.2f} ({row[measure + '_low']:.2f}…{row[measure + '_high']:.2f})"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def largest(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    foils = ("spread × sensitivity", "write norm", "layer distance")
    yield "model, input", "pairing", "edges to find", *OVERLAPS, *foils, "influence"
    for run, m, p in edges(runs):
        row = run.rows[m, p, "pk raw"]
        names = (*OVERLAPS, f"{foils[0]} ({m})", *foils[1:])
        cells = [run.cell(m, p, name, "ap") for name in names]
        influence = run.cell(m, p, f"influence ({m})", "ap", True)
        yield f"{run.name}, {m}", p, f"{row['largest_edges']} of {row['edges']:,}", *cells, influence


def inside_layers(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    shown = ("pk folded", "cs folded", "write norm", "spread × sensitivity", "influence")
    yield "model, input", "pairing", *shown, "spec: pk folded", "spec: cs folded", "spec: influence"
    for run, m, p in edges(runs):
        within = [run.cell(m, p, name, "within") for name in (*shown[:3], f"{shown[3]} ({m})")]
        spec = [run.cell(m, p, name, "spec") for name in shown[:2]]
        both = [run.cell(m, p, f"influence ({m})", measure, True) for measure in ("within", "spec")]
        yield f"{run.name}, {m}", p, *within, both[0], *spec, both[1]


def transfer(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    same, other = (f"statistics of the {which} kind" for which in ("same", "other"))
    yield "model", "pairing", "effects on", same, other, "pk folded", "correlation of influence on the two inputs"
    for run in (run for run in runs if len(run.materials) > 1):
        agreement = {row["pairing"]: row["spearman"] for row in run.found["agreement"]}
        for p in PAIRINGS:
            for m, o in (("random", "text"), ("text", "random")):
                found = [run.cell(m, p, f"influence ({kind})", "ap", True) for kind in (m, o)]
                yield run.name, p, m, *found, run.cell(m, p, "pk folded", "ap"), number(agreement[p])


def calibration(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    yield "model, input", "pairing", "edges", "median ratio", "slope", "correlation", *LABELS
    for run in runs:
        for material, rows in sorted(run.found.get("calibration", {}).items()):
            for row in rows:
                cells = [row["ratio"], row["slope"], row["correlation"], *(row.get(f"ratio from {x}") for x in SIZES)]
                yield f"{run.name}, {material}", row["pairing"], f"{row['edges']:,}", *map(number, cells)


def cost(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    yield "model", "edges", "statistics of text", "statistics of random sequences", "effects"
    for run in runs:
        cpu, tokens = run.found["cpu"], run.found["tokens"]
        counts = {f"observe {kind}": count for kind, count in tokens["statistics"].items()}
        counts["effects"] = sum(tokens["effects"].values())
        names = ("observe text", "observe random", "effects")
        cells = [f"{cpu[name]:.1f} s ({counts[name]:,} tokens)" if name in cpu else "–" for name in names]
        yield run.name, f"{sum(run.found['edges'].values()):,}", *cells


def edges(runs: list[Run]) -> Iterator[tuple[Run, str, str]]:
    return ((run, material, pairing) for run in runs for material in run.materials for pairing in PAIRINGS)


def main() -> None:
    runs = [Run(Path(path)) for path in sys.argv[1:]]
    for table in (largest, inside_layers, transfer, calibration, cost):
        lines = [f"| {' | '.join(row)} |" for row in table(runs)]
        print("\n".join([lines[0], "|" + "---|" * (lines[0].count("|") - 1), *lines[1:]]), end="\n\n")


if __name__ == "__main__":
    main()
