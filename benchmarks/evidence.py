"""The runs behind docs/evidence.md: how well overlap and influence predict measured effects.

    python benchmarks/evidence.py run demo --text --random --out out/evidence/demo.json
    python benchmarks/evidence.py tables out/evidence/*.json    the appendix; evidence_tables.py makes the rest
    python benchmarks/evidence.py figure docs/images/calibration.png demo MODEL … [--sequences 4]

Statistics and effects always come from different sequences: statistics from one built-in text and one stream of random
sequences, effects from another text and another stream.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import headspan as hs
from headspan.running import effect_sums
from headspan.running.effects_summary import effects_summary
from headspan.running.observe import observe
from headspan.vocabulary.heads import Role

MEASURES = ("spearman", "within", "spec", "ap", "hits")
INPUTS = {"text": "text", "random": "random sequences"}
NAMES = {
    "demo": "The demo model",
    "stories260k": "stories260K",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct",
    "gemma-3-270m-q4_k_m.gguf": "Gemma-3-270m",
    "qwen2.5-coder-0.5b.gguf": "Qwen2.5-Coder-0.5B",
}


class KLTotals(effect_sums.Totals):
    """Sums of KL divergences of attention rows in place of total variation."""

    def compare(self, key: Any, rows: Any, sources: int, before: Any, after: Any, sample: Any) -> None:
        if key[1].role is Role.V:
            return super().compare(key, rows, sources, before, after, sample)
        old, new = before.pattern.clamp_min(1e-30), after[0].clamp_min(1e-30)
        moved = (before.pattern * (old.log() - new.log())).sum((-2, -1))
        self.add("moved", key, rows, sources, moved)
        self.add("queries", key, rows, sources, moved.new_full(moved.shape, len(sample.ids)))


def amounts(kl: hs.Effects, scores: hs.Scores, material: str, pairing: str) -> tuple[np.ndarray, np.ndarray]:
    """influence² and the measured KL divergence of every edge that has both."""
    measured = kl.arrays[material, hs.Pairing.parse(pairing)]
    predicted = np.square(scores["influence", pairing].values)
    there = (measured > 0) & (predicted > 0)
    return predicted[there], measured[there]


def figure(models: list[str], out: Path, sequences: int) -> None:
    """Measured KL divergence against influence² of every OQ and OK edge, on random sequences, one panel per model.

    Statistics are of four times as many sequences. The rows of the table of calibrations are printed.
    """
    import matplotlib.pyplot as plt

    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    drawn, panels = plt.subplots(rows, columns, figsize=(3 * columns, 3 * rows), layout="constrained", squeeze=False)
    for model, axes in zip(models, panels.flat, strict=False):
        with patch.object(effect_sums, "Totals", KLTotals):
            moved = hs.effects(model, pairing="OQ,OK", random=True, sequences=sequences, draws=0)
        stats = observe(model, random=True, sequences=4 * sequences)
        scores = hs.score(model, "influence", "OQ,OK", "forward", stats=stats)
        print(model, moved.tokens, stats.tokens, json.dumps(calibration(moved, scores, "random")), flush=True)
        for pairing in ("OQ", "OK"):
            size = 3 if len(moved.ports.query) < 50 else 1
            axes.loglog(
                *amounts(moved, scores, "random", pairing), "o", markersize=size, label=pairing, rasterized=True
            )
        ends = axes.get_xlim()
        axes.loglog(ends, ends, color="grey", linewidth=0.8, zorder=0)
        axes.set(title=Path(model).stem, xlabel="influence² (nats)", ylabel="measured KL (nats)")
    for axes in panels.flat[len(models) :]:
        axes.remove()
    panels[0][0].legend()
    drawn.savefig(out, dpi=110)


def calibration(kl: hs.Effects, scores: hs.Scores, material: str) -> list[dict[str, Any]]:
    """Measured KL against influence², edge by edge, on a logarithmic scale."""
    rows = []
    for pairing in ("OQ", "OK"):
        x, y = np.log(amounts(kl, scores, material, pairing))
        row = {"pairing": pairing, "edges": len(x), "slope": float(np.polyfit(x, y, 1)[0])}
        row |= {"correlation": float(np.corrcoef(x, y)[0, 1]), "ratio": float(np.exp(np.median(y - x)))}
        for low, high in ((1e-12, 1e-4), (1e-4, 1e-3), (1e-3, 1e-2), (1e-2, 1e-1), (1e-1, 1e9)):
            inside = (np.exp(x) >= low) & (np.exp(x) < high)
            if inside.sum() >= 5:
                row[f"ratio from {low:g}"] = float(np.exp(np.median((y - x)[inside])))
        rows.append(row)
    return rows


def run(model: str, text: bool, random: bool, kl: bool, sequences: int | None) -> dict[str, Any]:
    stats, cpu = {}, {}
    for kind in [k for k, wanted in (("text", text), ("random", random)) if wanted]:
        start = time.process_time()
        stats[kind] = observe(model, random=kind == "random")
        cpu[f"observe {kind}"] = time.process_time() - start
    options = {"random": None if text and random else random, "draws": 0, "sequences": sequences}
    options |= {"text": built_in()} if text and not random else {}
    start = time.process_time()
    measured = hs.effects(model, **{k: v for k, v in options.items() if v is not None or k == "random"})
    cpu["effects"] = time.process_time() - start
    start = time.process_time()
    told = effects_summary(model, measured, stats=list(stats.values()))
    found: dict[str, Any] = {
        "model": Path(model).name,
        "edges": {str(p): int((measured.of(p) >= 0).sum()) for p in measured.pairings},
        "tokens": {"effects": measured.tokens, "statistics": {kind: one.tokens for kind, one in stats.items()}},
        "rows": told.rows(),
        "differences": told.differences,
        "agreement": told.agreement,
        "cpu": cpu,
    }
    if kl:
        with patch.object(effect_sums, "Totals", KLTotals):
            moved = hs.effects(model, pairing="OQ,OK", **{k: v for k, v in options.items() if v is not None})
        scored = {kind: hs.score(model, "influence", "OQ,OK", "forward", stats=one) for kind, one in stats.items()}
        found["calibration"] = {
            kind: calibration(moved, scored[kind], kind) for kind in stats if kind in moved.materials
        }
    return found


def built_in() -> str:
    from headspan.running.samples import EFFECTS_TEXT, built_in_text

    return built_in_text(EFFECTS_TEXT)


def tables(paths: list[Path]) -> str:
    lines = []
    for found in (json.loads(path.read_text()) for path in paths):
        name, tokens = NAMES.get(found["model"], found["model"]), found["tokens"]
        observed = " and ".join(f"{number:,} tokens of {INPUTS[kind]}" for kind, number in tokens["statistics"].items())
        for material, number in tokens["effects"].items():
            lines += [f"### {name}{', on text' if material == 'text' else ''}", ""]
            lines += [f"Effects on {number:,} tokens of {INPUTS[material]}.", f"Statistics of {observed}.", ""]
            lines += ["| pairing | predictor | " + " | ".join(MEASURES) + " |", "|---|---|" + "---|" * len(MEASURES)]
            for row in found["rows"]:
                if row["material"] == material:
                    cells = [_cell(row, measure) for measure in MEASURES]
                    lines.append(f"| {row['pairing']} | {row['predictor']} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def _cell(row: dict[str, Any], name: str) -> str:
    values = [row[name + end] for end in ("", "_low", "_high")]
    digits = 0 if name == "hits" else 2
    one, low, high = ("–" if value is None else f"{value:.{digits}f}" for value in values)
    return one if low == "–" else f"{one} ({low}…{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("model")
    one.add_argument("--text", action="store_true")
    one.add_argument("--random", action="store_true")
    one.add_argument("--kl", action="store_true", help="also measure KL divergences, which takes as long again")
    one.add_argument("--sequences", type=int)
    one.add_argument("--out", type=Path, required=True)
    drawn = commands.add_parser("figure")
    drawn.add_argument("out", type=Path)
    drawn.add_argument("models", nargs="+")
    drawn.add_argument("--sequences", type=int, default=4)
    several = commands.add_parser("tables")
    several.add_argument("paths", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "tables":
        print(tables(given.paths))
        return
    if given.command == "figure":
        figure(given.models, given.out, given.sequences)
        return
    found = run(given.model, given.text, given.random, given.kl, given.sequences)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
