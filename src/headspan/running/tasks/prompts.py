from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True)
class Prompt:
    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answers: tuple[int, ...]
    wrong: tuple[int, ...]
    text: str = ""
