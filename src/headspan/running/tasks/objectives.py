"""What a task measures at the last token of a prompt, one number per prompt; larger means solved better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headspan.running.tasks.pairs import Prompt
from headspan.vocabulary.errors import HeadspanError

if TYPE_CHECKING:
    import torch

OBJECTIVES = {
    "logit-difference": "mean logit of the answers less that of the wrong answers",
    "log-probability": "log-probability of the answers together",
    "kl": "KL divergence from the clean run, negative",
}


@dataclass
class Batch:
    """Prompts of one length, as tensors."""

    prompts: Sequence[Prompt]
    clean: torch.Tensor  # (B, T)
    corrupted: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> Batch:
        import torch

        return cls(prompts, torch.tensor([p.clean for p in prompts]), torch.tensor([p.corrupted for p in prompts]))


def batches(prompts: Sequence[Prompt], most_tokens: int) -> list[Batch]:
    """Prompts of the same length together, at most so many tokens at a time."""
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt.clean), []).append(prompt)
    steps = {length: max(1, most_tokens // length) for length in by_length}
    return [
        Batch.of(alike[start : start + steps[length]])
        for length, alike in by_length.items()
        for start in range(0, len(alike), steps[length])
    ]


def check_objective(name: str, method: str) -> None:
    """Refuse an unknown objective, and one that a method cannot attribute."""
    if name not in OBJECTIVES:
        raise HeadspanError(f"unknown objective {str(name)[:40]!r}. Choose {', '.join(OBJECTIVES)}")
    if name == "kl" and method == "eap":
        raise HeadspanError("the gradient of KL is zero at the clean run, so eap finds nothing with it. Use method ig")


def objective(name: str, batch: Batch, logits: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """The value of every prompt (B,) from logits (B, vocabulary) and those of the clean run."""
    import torch

    logits = logits.float() if logits.element_size() < 4 else logits
    if name == "kl":
        target = clean.to(logits).log_softmax(-1)
        return -(target.exp() * (target - logits.log_softmax(-1))).sum(-1)
    values = []
    for row, prompt in zip(logits, batch.prompts, strict=True):
        answers = row[list(prompt.answers)]
        if name == "log-probability":
            values.append(answers.logsumexp(0) - row.logsumexp(0))
        else:
            values.append(answers.mean() - row[list(prompt.wrong)].mean())
    return torch.stack(values)
