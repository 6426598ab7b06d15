"""``headspan.wiring``: the chosen edges as a graph that a notebook shows as a drawing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from html import escape
from typing import ParamSpec

from headspan.graphs.graph import Wiring
from headspan.graphs.selection import wiring as choose_edges

P = ParamSpec("P")


class DrawnWiring(Wiring):
    """A wiring that draws itself in a notebook."""

    def _repr_svg_(self) -> str | None:
        from headspan.plotting import wiring_svg

        return wiring_svg(self) if self.edges else None

    def _repr_html_(self) -> str | None:
        """A message with what to try instead of an empty drawing."""
        return None if self.edges else "".join(f"<p>{escape(note)}</p>" for note in self.notes)


def _drawn(choose: Callable[P, Wiring]) -> Callable[P, DrawnWiring]:
    @wraps(choose)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> DrawnWiring:
        found = choose(*args, **kwargs)
        return DrawnWiring(**{name: getattr(found, name) for name in Wiring.__dataclass_fields__})

    return drawn


wiring = _drawn(choose_edges)
