"""Odd values in one or two arguments of public functions and methods: a message, never an internal error.

The functions, their good arguments and the odd values are those of ``tests/test_odd_calls.py``, which tries every odd
value alone; here they are drawn, several at a time.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from commands import environment
from place import check_sentence

import headspan as hs

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_odd_calls as table


class Call(NamedTuple):
    name: str
    odd: dict[str, str]


class Calls:
    cpu_seconds, memory = 30.0, 2 << 30

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "calls"
        self.folder.mkdir()
        self.things: dict[str, Any] = table.small_things()
        self.calls = table.functions() | table.methods(self.things)

    def case(self, chance: random.Random) -> Call:
        name = chance.choice(sorted(self.calls))
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        names = [p.name for p in inspect.signature(self.calls[name]).parameters.values() if p.kind not in kinds]
        chosen = chance.sample(names, min(len(names), chance.choice([1, 2, 2, 3])))
        odd = {parameter: chance.choice(sorted(table.ODD)) for parameter in chosen}
        return Call(name, {p: value for p, value in odd.items() if (p, value) not in table.GOOD})

    def run(self, case: Call) -> list[str]:
        call = self.calls[case.name]
        parameters = inspect.signature(call).parameters.values()
        good = {p.name: self.things[p.name] for p in parameters if p.default is p.empty and p.name in self.things}
        arguments = good | {name: table.ODD[odd]() for name, odd in case.odd.items()}
        try:
            with warnings.catch_warnings(), environment(self.folder, HF_HUB_OFFLINE="1"):
                warnings.simplefilter("ignore")
                call(**arguments)
        except hs.HeadspanError as error:
            return [check_sentence(str(error))]
        except (KeyboardInterrupt, TypeError) as error:
            if isinstance(error, TypeError) and "missing" in str(error) and "required" in str(error):
                return [str(error)]  # Python's own sentence for an argument that was not given
            raise
        return []
