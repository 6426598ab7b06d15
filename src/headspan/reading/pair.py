"""What two heads share: principal angles, shared directions, and the tokens along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from headspan.models.weights import AttentionWeights
from headspan.reading.head_pairs import HeadPairs, head_pairs, is_port
from headspan.reading.overlap import (
    DEGENERATE_GAP,
    SHARED_LEVEL,
    degenerate_blocks,
    notes_on_shared_heads,
    overlap,
    participation_ratio,
)
from headspan.reading.token_lengths import MAX_BLOCK, VocabularyRows, parse_preprocess, through_norm
from headspan.reading.tokens import Token, check_count, readable_tokens, reader
from headspan.results.checks import damaged
from headspan.results.tabular import Tabular, same_content
from headspan.scoring.inputs import given_weights
from headspan.subspaces.bases import principal_angles, principal_vectors
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed, warn_renamed
from headspan.system.ordering import Best
from headspan.vocabulary.errors import HeadspanError, refuse_ignored
from headspan.vocabulary.heads import Head, Port, does_as

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike

DEFAULT = "centre-normalise"
DEGENERATE_NOTE = (
    f"directions whose cosines differ by less than {DEGENERATE_GAP} form a block: only the span of the block is "
    "determined, not the directions in it, so read the tokens of a block together"
)


class SignedTokens(NamedTuple):
    """Tokens along a direction and against it; the sign of a direction is arbitrary."""

    positive: list[Token]
    negative: list[Token]

    def joined(self) -> str:
        """The tokens as text: those along the direction | those against it."""
        return " | ".join(" ".join(token.token for token in side) for side in self)


@dataclass(frozen=True)
class SharedDirection:
    """One pair of principal directions.

    rank: 1 for the smallest angle. block: ranks of the directions with nearly the same cosine, including this one.
    source_tokens, target_tokens: tokens along the direction of each side: what it writes, through final norm and
    unembedding, or what it reads, through the embedding. None where the checkpoint has no such matrix.
    """

    rank: int
    cosine: float
    angle_degrees: float
    block: tuple[int, ...]
    source_tokens: SignedTokens | None = None
    target_tokens: SignedTokens | None = None

    @property
    def unique(self) -> bool:
        return len(self.block) == 1

    @property
    def writes(self) -> SignedTokens | None:
        """The old name of ``source_tokens``."""
        warn_renamed("SharedDirection.writes", "SharedDirection.source_tokens")
        return self.source_tokens

    @property
    def reads(self) -> SignedTokens | None:
        """The old name of ``target_tokens``."""
        warn_renamed("SharedDirection.reads", "SharedDirection.target_tokens")
        return self.target_tokens


@dataclass(frozen=True, repr=False, eq=False)
class PairReport(Tabular):
    """The relation of the subspaces of two weights; see :func:`pair`.

    principal_angles: radians, ascending. random_mean, random_sd, z: PK against independent random subspaces of the
    same dimensions (z is None if PK is constant), in d − 1 dimensions if both are centred and in d otherwise.
    shared_directions: how many cos² are above shared_threshold, without forced_directions, which any two subspaces of
    these dimensions must share.
    """

    source: str
    target: str
    d_model: int
    dimensions: tuple[int, int]
    pk: float
    pk_normalised: float
    principal_angles: np.ndarray
    random_mean: float
    random_sd: float
    z: float | None
    shared_directions: int
    shared_threshold: float
    forced_directions: int
    participation_ratio: float
    directions: list[SharedDirection]
    shared_level: float = SHARED_LEVEL
    notes: list[str] = field(default_factory=list[str])

    @property
    def pair(self) -> str:
        """``L4H11.O → L5H1.K``, with an arrow where the source writes what the target reads."""
        flow = Port.parse(self.source).role.writes and not Port.parse(self.target).role.writes
        return f"{self.source} {'→' if flow else 'and'} {self.target}"

    def rows(self) -> list[dict[str, Any]]:
        """One record per pair of principal directions, smallest angle first; tokens for those in ``directions``.

        source_does, target_does: what each side does, ``writes`` or ``reads (key)``.
        """
        does = {"source_does": does_as(self.source), "target_does": does_as(self.target)}
        shown: list[SharedDirection | None] = [*self.directions]
        shown += [None] * (len(self.principal_angles) - len(shown))
        return [
            {
                "source": self.source, "target": self.target, "rank": rank, "cosine": float(np.cos(angle)),
                "angle_degrees": float(np.degrees(angle)),
                "block": None if one is None else ";".join(map(str, one.block)),
                **does,
                "source_tokens": None if one is None or one.source_tokens is None else one.source_tokens.joined(),
                "target_tokens": None if one is None or one.target_tokens is None else one.target_tokens.joined(),
            }
            for rank, (angle, one) in enumerate(zip(self.principal_angles, shown, strict=True), start=1)
        ]  # fmt: skip

    def _headline(self) -> str:
        chance = f"random {self.random_mean:.4f} ± {self.random_sd:.4f}"
        chance += "" if self.z is None else f", z = {self.z:.1f}"
        return (
            f"{self.pair}: subspaces of {self.dimensions[0]} and {self.dimensions[1]} dimensions in "
            f"{self.d_model}\n"
            f"  PK {self.pk:.4f} (normalised {self.pk_normalised:.4f}, {chance}), {self.shared_directions} shared "
            f"directions, participation ratio {self.participation_ratio:.1f}"
        )

    def _check(self, path: Path) -> None:
        if self.principal_angles.ndim != 1 or len(self.directions) > len(self.principal_angles):
            raise damaged(path, "its directions do not fit its angles")

    def __eq__(self, other: object) -> bool:
        return same_content(self.to_dict(), other.to_dict()) if isinstance(other, PairReport) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, with the angles in degrees too."""
        plain = super().to_dict()
        plain["principal_angles_degrees"] = np.degrees(self.principal_angles).tolist()
        for entry, direction in zip(plain["directions"], self.directions, strict=True):
            entry["unique"] = direction.unique
        return plain


@overload
def pair(model: ModelLike, source: Port, target: Port, *args: Any, **options: Any) -> PairReport: ...


@overload
def pair(
    model: ModelLike, source: Port | str, target: Port | str, k: int, *args: Any, **options: Any
) -> PairReport: ...


@overload
def pair(model: ModelLike, source: Head, target: Head | Port | str) -> HeadPairs: ...


@overload
def pair(model: ModelLike, source: Head | Port | str, target: Head | Port | str, **options: Any) -> Any: ...


@renamed(weights="model", top="k")
@checked
def pair(
    model: ModelLike,
    source: Head | Port | str,
    target: Head | Port | str,
    k: int | None = None,
    tokens: int | None = None,
    preprocess: str | None = None,
) -> PairReport | HeadPairs:
    """Compare two weights of a model, written ``"L4H11.O"`` and ``"L5H1.K"``, or all weights of two heads.

    A head without a role, ``"L4H11"``, stands for all its weights: the result then lists every pairing of the two
    (:class:`headspan.reading.head_pairs.HeadPairs`).

    model: opened weights or a model reference.
    k: number of leading directions to show (10 by default), with ``tokens`` for each sign (5 by default).
    preprocess: of token vectors, ``"centre-normalise"`` by default.

    >>> from headspan.models.opening import open
    >>> axes = np.eye(6)[None, None]
    >>> weights = open({"Q": axes[..., :3], "K": axes[..., 2:5], "V": axes[..., :3], "O": axes[..., :3]})
    >>> pair(weights, "L0H0.O", "L0H0.K").pk
    1.0
    >>> len(pair(weights, "L0H0", "L0H0.K").rows())
    4
    """
    weights = given_weights(model)
    if not (is_port(source) and is_port(target)):
        refuse_ignored("on heads without roles, whose pairings are listed", k=k, tokens=tokens, preprocess=preprocess)
        return head_pairs(weights, source, target)
    reader = PairReader(weights, preprocess or DEFAULT)
    return reader.compare(source, target, 10 if k is None else k, 5 if tokens is None else tokens)  # type: ignore[arg-type]


class PairReader:
    """Compares many pairs of one model, reading its vocabulary once."""

    def __init__(
        self,
        weights: AttentionWeights,
        preprocess: str = "centre-normalise",
        unembedding: VocabularyRows | None = None,
    ) -> None:
        parse_preprocess(preprocess)
        self.weights = weights
        self._preprocess = preprocess
        self._readable = reader(weights)
        self._missing: dict[bool, str] = {}
        rows = self._rows(True, lambda: unembedding or VocabularyRows.unembedding(weights))
        self._unembedding = rows
        self._embedding = self._rows(False, lambda: VocabularyRows.embedding(weights, rows))

    def _rows(self, written: bool, read: Callable[[], VocabularyRows]) -> VocabularyRows | None:
        try:
            return read()
        except HeadspanError as error:
            self._missing[written] = f"no tokens {'written' if written else 'read'}: {error}"
            return None

    def compare(self, source: Port | str, target: Port | str, top: int = 10, tokens: int = 5) -> PairReport:
        """The report of :func:`pair` for one pair."""
        check_count(top)
        check_count(tokens)
        found = overlap(self.weights, source, target)
        writes = Port.parse(source).role.writes, Port.parse(target).role.writes
        directions = self.directions_of([found.bases], top, tokens, writes)[0]
        unclear = [] if all(direction.unique for direction in directions) else [DEGENERATE_NOTE]
        missing = [self._missing[side] for side in dict.fromkeys(writes) if side in self._missing]
        return PairReport(
            source=str(source),
            target=str(target),
            d_model=self.weights.d_model,
            dimensions=found.dimensions,
            pk=found.pk,
            pk_normalised=found.pk_normalised,
            principal_angles=found.principal_angles,
            random_mean=found.random_mean,
            random_sd=found.random_sd,
            z=found.z,
            shared_directions=found.shared_directions,
            shared_threshold=found.shared_threshold,
            forced_directions=found.forced_directions,
            participation_ratio=participation_ratio(np.cos(found.principal_angles) ** 2),
            directions=directions,
            notes=[*notes_on_shared_heads(self.weights, source, target), *missing, *unclear, *found.notes],
        )

    def directions_of(
        self,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        top: int,
        tokens: int,
        writes: tuple[bool, bool] = (True, False),
    ) -> list[list[SharedDirection]]:
        """The leading directions of many pairs of bases with their tokens, in one pass over the vocabulary.

        writes: whether the source and the target of these pairs write; what reads is compared with the embedding.
        """
        turned = [_leading(first, second, top) for first, second in pairs]
        sides = [np.hstack([t[i] for t in turned]) for i in range(2)]
        norm = self.weights.final_norm()
        sides = [through_norm(norm, side) if w else side for side, w in zip(sides, writes, strict=True)]
        rows = [self._unembedding if w else self._embedding for w in writes]
        if rows[0] is rows[1]:  # tied, or both sides do the same: both in one pass
            both = self._tokens_along(rows[0], np.hstack(sides), tokens)
            sources, targets = both[: sides[0].shape[1]], both[sides[0].shape[1] :]
        else:
            sources, targets = (self._tokens_along(*given, tokens) for given in zip(rows, sides, strict=True))
        found: list[list[SharedDirection]] = []
        at = 0
        for directions, _, angles in turned:
            n = directions.shape[1]
            found.append(_described(angles, sources[at : at + n], targets[at : at + n]))
            at += n
        return found

    def _tokens_along(
        self, rows: VocabularyRows | None, directions: np.ndarray, k: int
    ) -> list[SignedTokens] | list[None]:
        """Tokens with the largest and the smallest f(e)·direction, for each normalised direction (d, n)."""
        n = directions.shape[1]
        if rows is None:
            return [None] * n
        lengths = np.linalg.norm(directions, axis=0)
        directions = (directions / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        along, against = Best(n, k), Best(n, k)
        for start, block in rows.preprocessed(self._preprocess, MAX_BLOCK):
            products = block @ directions
            along.update(start, products)
            against.update(start, -products)
        against.scores = -against.scores
        both = zip(readable_tokens(along, self._readable), readable_tokens(against, self._readable), strict=True)
        return [SignedTokens(*tokens) for tokens in both]


def _leading(first: np.ndarray, second: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first principal directions of both sides, and all angles."""
    sources, targets, _ = principal_vectors(first, second)
    return *_fix_signs(sources[:, :top], targets[:, :top]), principal_angles(first, second)


def _described(
    angles: np.ndarray, sources: Sequence[SignedTokens | None], targets: Sequence[SignedTokens | None]
) -> list[SharedDirection]:
    cosines = np.cos(angles)
    blocks = degenerate_blocks(cosines)
    return [
        SharedDirection(i + 1, float(cosines[i]), float(np.degrees(angles[i])), blocks[i], sources[i], targets[i])
        for i in range(len(sources))
    ]


def _fix_signs(sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both directions of a pair with the source's largest entry positive, so that signs agree on all machines."""
    largest = np.abs(sources).argmax(axis=0)
    signs = np.sign(sources[largest, np.arange(sources.shape[1])])
    return sources * signs, targets * signs
