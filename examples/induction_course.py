"""When does the induction circuit of the demo model form? Draw it from a series with head scores.

python examples/train_demo.py --out my-demo --checkpoints series
headspan track 'series/step*' --run --out run.safetensors
python examples/induction_course.py run.safetensors course.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from headspan.change.series import Series, half_time
from headspan.plotting import style
from headspan.plotting.canvas import new_figure, save, theme
from headspan.vocabulary.heads import Role


def courses(series: Series, threshold: float = 0.6) -> dict[str, np.ndarray]:
    """Scores of the best previous-token head, of the induction heads, and PK of the OK edges between them, by step."""
    names = [str(head) for head in series.heads[Role.Q]]
    previous, induction = series.head_scores["previous_token"], series.head_scores["induction"]
    first = names[int(np.argmax(previous[-1]))]
    readers = [name for name, value in zip(names, induction[-1], strict=True) if value > threshold]
    return {
        f"{first}: previous-token score": previous[:, names.index(first)],
        f"{len(readers)} heads: induction score": induction[:, [names.index(name) for name in readers]].mean(axis=1),
        f"PK of {first} → their keys": np.mean([series.of(first, name, "OK") for name in readers], axis=0),
    }


def draw(series: Series, out: Path) -> None:
    """Two panels over steps, and for each curve the step by which half of its growth was there."""
    found = courses(series)
    colours = (style.INK, style.ROLE_COLOURS[Role.O], style.ROLE_COLOURS[Role.K])
    with theme():
        figure = new_figure(7.2, 4.6, layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for (label, values), colour in zip(found.items(), colours, strict=True):
            axes = upper if label.startswith("PK") else lower
            half = half_time(series.numbers, values.astype(float))
            axes.plot(
                series.numbers, values, color=colour, marker=".", ms=4, lw=1.4, label=f"{label} (half by {half:.0f})"
            )
            axes.axvline(half, color=colour, lw=0.8, ls=":")
        upper.set_ylabel("PK (random: 4)")
        lower.set(ylabel="mean attention", xlabel="training step", ylim=(0, 1))
        for axes in (upper, lower):
            axes.legend(loc="lower right")
        save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the course of the demo model's induction circuit.")
    parser.add_argument("series", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    draw(Series.load(arguments.series), arguments.out)


if __name__ == "__main__":
    main()
