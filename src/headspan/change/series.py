"""A training run step by step, in one safetensors file: edges that form, heads that move, hubs and head scores.

`headspan.track` makes it (:mod:`headspan.change.track`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.change.series_file import SEALED_SCHEMA, SeriesEdge, Step, read_series, series_parts
from headspan.results.tabular import Tabular, data_frame, same_content
from headspan.system.deprecation import warn_renamed
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Head, Pairing, Role

if TYPE_CHECKING:
    import pandas

TABLES = ("trajectory", "edge", "drift", "hub", "head")


class Trajectory(NamedTuple):
    """The trajectory of one edge.

    birth: the first step at which it was among the strongest k. growth: last score minus first.
    half: the step at which half of the growth was reached (interpolated linearly); NaN if nothing changed.
    """

    edge: SeriesEdge
    first: float
    final: float
    birth: int
    growth: float
    half: float
    rank: int  # at the last step


@dataclass(frozen=True, repr=False, eq=False)
class Series(Tabular):
    """Everything measured along a training run. Arrays have one row per step.

    scores, ranks: (steps, edges), PK and rank in its pairing; NaN and 0 if an edge was not kept at a step.
    from_previous, from_last: by role (steps, heads), drift from the previous step (NaN at the first) and from the last.
    hubs: by (inlet or outlet, pairing), (steps, heads). head_scores: by kind (steps, query heads), empty without a run.
    """

    _sealed_since = SEALED_SCHEMA

    steps: tuple[Step, ...]
    k: int
    folding: str
    heads: dict[Role, tuple[Head, ...]]
    edges: tuple[SeriesEdge, ...]
    scores: np.ndarray = field(repr=False)
    ranks: np.ndarray = field(repr=False)
    from_previous: dict[Role, np.ndarray] = field(repr=False)
    from_last: dict[Role, np.ndarray] = field(repr=False)
    hubs: dict[tuple[str, Pairing], np.ndarray] = field(repr=False)
    head_scores: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], repr=False)
    notes: list[str] = field(default_factory=list[str])
    provenance: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def numbers(self) -> np.ndarray:
        """The step numbers."""
        return np.array([step.step for step in self.steps])

    def of(self, source: Head | str, target: Head | str, pairing: str | Pairing) -> np.ndarray:
        """The PK of one edge over the steps."""
        wanted = SeriesEdge(Pairing.parse(pairing), Head.parse(source), Head.parse(target))
        if wanted not in self.edges:
            raise HeadspanError(
                f"the edge {wanted} is not in this series, which has the {len(self.edges)} edges that were among the "
                f"strongest {self.k} of their pairing at some step. Track again with a larger k"
            )
        return self.scores[:, self.edges.index(wanted)]

    def trajectories(self) -> list[Trajectory]:
        """The trajectory of every edge, those that grew most first."""
        found = [self._trajectory(i, edge) for i, edge in enumerate(self.edges)]
        return sorted(found, key=lambda one: math.inf if math.isnan(one.growth) else -one.growth)

    def _trajectory(self, column: int, edge: SeriesEdge) -> Trajectory:
        scores, numbers = self.scores[:, column].astype(np.float64), self.numbers
        among = (self.ranks[:, column] > 0) & (self.ranks[:, column] <= self.k)
        birth = int(numbers[np.argmax(among)])
        growth = float(scores[-1] - scores[0])
        return Trajectory(
            edge, float(scores[0]), float(scores[-1]), birth, growth, half_time(numbers, scores),
            int(self.ranks[-1, column]),
        )  # fmt: skip

    # ---------------------------------------------------------------- records

    def __eq__(self, other: object) -> bool:
        return same_content(self.rows("all"), other.rows("all")) if isinstance(other, Series) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def rows(self, table: str = "trajectory") -> list[dict[str, Any]]:
        """Flat records: trajectory (one per edge); edge, drift, hub and head (one per step each); or all of them."""
        if table != "all" and table not in TABLES:
            raise HeadspanError(f"unknown table {table!r}. Choose {', '.join(TABLES)} or all")
        rows = [row for name in TABLES if table in ("all", name) for row in getattr(self, f"_{name}_rows")()]
        columns = dict.fromkeys(key for row in rows for key in row)
        return [{key: row.get(key) for key in columns} for row in rows]

    def records(self, table: str = "all") -> list[dict[str, Any]]:
        """The old name of :meth:`rows`."""
        warn_renamed("Series.records", "Series.rows")
        return self.rows(table)

    def _trajectory_rows(self) -> Iterator[dict[str, Any]]:
        for line in self.trajectories():
            values = {key: value for key, value in line._asdict().items() if key != "edge"}
            yield {"table": "trajectory", **_names(line.edge), **values}

    def _edge_rows(self) -> Iterator[dict[str, Any]]:
        for row, step in enumerate(self.steps):
            for column, edge in enumerate(self.edges):
                value, rank = float(self.scores[row, column]), int(self.ranks[row, column])
                yield {"table": "edge", **_where(step), **_names(edge), "score": value, "rank": rank or None}

    def _drift_rows(self) -> Iterator[dict[str, Any]]:
        for row, step in enumerate(self.steps):
            for role, heads in self.heads.items():
                for column, head in enumerate(heads):
                    yield {
                        "table": "drift", **_where(step), "head": str(head), "role": str(role),
                        "from_previous": float(self.from_previous[role][row, column]),
                        "from_last": float(self.from_last[role][row, column]),
                    }  # fmt: skip

    def _hub_rows(self) -> Iterator[dict[str, Any]]:
        for row, step in enumerate(self.steps):
            for (hub, pairing), values in self.hubs.items():
                heads = self.heads[pairing.target if hub == "inlet" else pairing.source]
                for column, head in enumerate(heads):
                    if not math.isnan(values[row, column]):
                        where = {"table": "hub", **_where(step), "pairing": str(pairing), "hub": hub}
                        yield where | {"head": str(head), "score": float(values[row, column])}

    def _head_rows(self) -> Iterator[dict[str, Any]]:
        for row, step in enumerate(self.steps):
            for kind, values in self.head_scores.items():
                for head, value in zip(self.heads[Role.Q], values[row], strict=True):
                    yield {"table": "head", **_where(step), "head": str(head), "kind": kind, "score": float(value)}

    def to_pandas(self, table: str = "trajectory") -> pandas.DataFrame:
        """One of the tables as a data frame."""
        return data_frame(self.rows(table))

    def _headline(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"Series of {len(self.steps)} steps, {first.name} to {last.name}, {len(self.edges)} edges"

    # ------------------------------------------------------------------ files

    def _to_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return series_parts(self)

    @classmethod
    def _from_parts(cls, head: Any, arrays: Mapping[str, np.ndarray], path: Path) -> Series:
        return cls(*read_series(head, arrays, path))

    def _inputs(self) -> list[str]:
        return [step.name for step in self.steps]


def half_time(numbers: np.ndarray, scores: np.ndarray) -> float:
    """The step at which half of the change from the first to the last score was reached, by linear interpolation.

    >>> half_time(np.array([0, 10, 20]), np.array([1.0, 1.0, 3.0]))
    15.0
    """
    known = ~np.isnan(scores)
    numbers, scores = numbers[known], scores[known]
    if len(scores) < 2 or abs(scores[-1] - scores[0]) < 1e-3:
        return math.nan
    share = (scores - scores[0]) / (scores[-1] - scores[0])
    after = int(np.argmax(share >= 0.5))
    below, above = share[after - 1], share[after]
    return float(numbers[after - 1] + (0.5 - below) / (above - below) * (numbers[after] - numbers[after - 1]))


def _where(step: Step) -> dict[str, Any]:
    return {"step": step.step, "name": step.name}


def _names(edge: SeriesEdge) -> dict[str, str]:
    return {"pairing": str(edge.pairing), "source": str(edge.source), "target": str(edge.target)}
