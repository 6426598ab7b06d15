"""What two heads share: principal angles, shared directions, and the tokens along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.reading.token_lengths import MAX_BLOCK, VocabularyRows, parse_preprocess, through_norm
from headspan.reading.tokens import Token, check_count, readable_tokens, reader
from headspan.results.checks import damaged
from headspan.results.tabular import Tabular, same_content
from headspan.scoring.inputs import given_weights
from headspan.statistics.dimension import pair_dimension_of
from headspan.subspaces.bases import orthonormal_basis, principal_angles, principal_vectors, projection_kernel
from headspan.subspaces.random_subspaces import moments
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.ordering import Best
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Port

if TYPE_CHECKING:
    from headspan.models.families.latent_attention import Chance
    from headspan.models.opening import ModelLike
from headspan.models.weights import AttentionWeights

SHARED_LEVEL = 0.99
# Quantile of the Tracy–Widom distribution of order 1 at SHARED_LEVEL.
_TRACY_WIDOM = 2.0234
# Neighbouring cosines closer than this count as equal: small changes in the weights would rotate their directions.
DEGENERATE_GAP = 0.01
LATENT_NOTE = (
    "both weights share the latent of one layer: chance is that of random subspaces of the latent, not of the stream"
)
CENTRED_NOTE = "folding has centred both weights: chance is that of random subspaces of {} dimensions"
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
    writes: tokens along the source's direction, through final norm and unembedding; reads: tokens along the target's
    direction, through the embedding. None where the checkpoint has no such matrix.
    """

    rank: int
    cosine: float
    angle_degrees: float
    block: tuple[int, ...]
    writes: SignedTokens | None = None
    reads: SignedTokens | None = None

    @property
    def unique(self) -> bool:
        return len(self.block) == 1


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

    def rows(self) -> list[dict[str, Any]]:
        """One record per pair of principal directions, smallest angle first; tokens for those in ``directions``."""
        shown: list[SharedDirection | None] = [*self.directions]
        shown += [None] * (len(self.principal_angles) - len(shown))
        return [
            {
                "source": self.source, "target": self.target, "rank": rank, "cosine": float(np.cos(angle)),
                "angle_degrees": float(np.degrees(angle)),
                "block": None if one is None else ";".join(map(str, one.block)),
                "writes": None if one is None or one.writes is None else one.writes.joined(),
                "reads": None if one is None or one.reads is None else one.reads.joined(),
            }
            for rank, (angle, one) in enumerate(zip(self.principal_angles, shown, strict=True), start=1)
        ]  # fmt: skip

    def _headline(self) -> str:
        chance = f"random {self.random_mean:.4f} ± {self.random_sd:.4f}"
        chance += "" if self.z is None else f", z = {self.z:.1f}"
        return (
            f"{self.source} → {self.target}: subspaces of {self.dimensions[0]} and {self.dimensions[1]} dimensions in "
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


@renamed(weights="model", top="k")
@checked
def pair(
    model: ModelLike,
    source: Port | str,
    target: Port | str,
    k: int = 10,
    tokens: int = 5,
    preprocess: str = "centre-normalise",
) -> PairReport:
    """Compare two weights of a model, written ``"L4H11.O"`` and ``"L5H1.K"``.

    model: opened weights or a model reference.
    k: number of leading directions to show, with ``tokens`` for each sign.

    >>> from headspan.models.opening import open
    >>> axes = np.eye(6)[None, None]
    >>> weights = open({"Q": axes[..., :3], "K": axes[..., 2:5], "V": axes[..., :3], "O": axes[..., :3]})
    >>> pair(weights, "L0H0.O", "L0H0.K").pk
    1.0
    """
    return PairReader(given_weights(model), preprocess).compare(source, target, k, tokens)


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
        self._missing: list[str] = []
        rows = self._rows("written", lambda: unembedding or VocabularyRows.unembedding(weights))
        self._unembedding = rows
        self._embedding = self._rows("read", lambda: VocabularyRows.embedding(weights, rows))

    def _rows(self, what: str, read: Callable[[], VocabularyRows]) -> VocabularyRows | None:
        try:
            return read()
        except HeadspanError as error:
            self._missing.append(f"no tokens {what}: {error}")
            return None

    def compare(self, source: Port | str, target: Port | str, top: int = 10, tokens: int = 5) -> PairReport:
        """The report of :func:`pair` for one pair."""
        check_count(top)
        check_count(tokens)
        first, second = (_basis(self.weights, name) for name in (source, target))
        angles = principal_angles(first, second)
        squares = np.cos(angles) ** 2
        m, m2 = first.shape[1], second.shape[1]
        d = max(pair_dimension_of(self.weights, source, target), m, m2)
        pk = projection_kernel(first, second)
        mean, variance = (float(value) for value in moments(d, m, m2))
        latent = self._latent_chance(source, target, (m, m2))
        if latent is not None:
            mean, variance = latent.mean, latent.sd**2
        forced = max(0, m + m2 - d)
        threshold = largest_random_square(d, m, m2)
        directions = self.directions_of([(first, second)], top, tokens)[0]
        unclear = [] if all(direction.unique for direction in directions) else [DEGENERATE_NOTE]
        return PairReport(
            source=str(source),
            target=str(target),
            d_model=self.weights.d_model,
            dimensions=(m, m2),
            pk=pk,
            pk_normalised=pk / min(m, m2),
            principal_angles=angles,
            random_mean=mean,
            random_sd=variance**0.5,
            z=(pk - mean) / variance**0.5 if variance > 0 else None,
            shared_directions=max(0, int(np.count_nonzero(squares > threshold)) - forced),
            shared_threshold=threshold,
            forced_directions=forced,
            participation_ratio=participation_ratio(squares),
            directions=directions,
            notes=[
                *self._shared(source, target),
                *self._missing,
                *unclear,
                *([LATENT_NOTE] if latent else []),
                *([CENTRED_NOTE.format(d)] if d < self.weights.d_model and not latent else []),
            ],
        )

    def directions_of(
        self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], top: int, tokens: int
    ) -> list[list[SharedDirection]]:
        """The leading directions of many pairs of bases with their tokens, in one pass over the vocabulary."""
        turned = [_leading(first, second, top) for first, second in pairs]
        written = through_norm(self.weights.final_norm(), np.hstack([t[0] for t in turned]))
        read = np.hstack([t[1] for t in turned])
        if self._embedding is self._unembedding:  # tied: both sides in one pass
            both = self._tokens_along(self._unembedding, np.hstack([written, read]), tokens)
            writes, reads = both[: written.shape[1]], both[written.shape[1] :]
        else:
            writes = self._tokens_along(self._unembedding, written, tokens)
            reads = self._tokens_along(self._embedding, read, tokens)
        found: list[list[SharedDirection]] = []
        at = 0
        for sources, _, angles in turned:
            n = sources.shape[1]
            found.append(_described(angles, writes[at : at + n], reads[at : at + n]))
            at += n
        return found

    def _latent_chance(self, source: Port | str, target: Port | str, ranks: tuple[int, int]) -> Chance | None:
        """PK by chance if both weights share the latent of one layer; otherwise None."""
        (first, role), (second, role2) = Port.parse(source), Port.parse(target)
        if first.layer != second.layer or "KR" in (first.kind, second.kind):
            return None
        return self.weights.same_layer_chance(role, role2, first.layer, ranks)

    def _shared(self, *names: Port | str) -> list[str]:
        """A note for each query head whose name refers to its KV head here."""
        parsed = [head for name in names if (head := Port.parse(name)).head.kind != "QR"]
        found = [self.weights.ports.note(head, role) for head, role in parsed]
        return [sentence for sentence in found if sentence is not None]

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
    angles: np.ndarray, writes: Sequence[SignedTokens | None], reads: Sequence[SignedTokens | None]
) -> list[SharedDirection]:
    cosines = np.cos(angles)
    blocks = degenerate_blocks(cosines)
    return [
        SharedDirection(i + 1, float(cosines[i]), float(np.degrees(angles[i])), blocks[i], writes[i], reads[i])
        for i in range(len(writes))
    ]


def participation_ratio(squares: np.ndarray) -> float:
    """(Σcos²)² / Σcos⁴: the effective number of shared directions; 0 if nothing is shared.

    >>> participation_ratio(np.array([0.5, 0.5, 0.0]))
    2.0
    """
    fourth = float(np.square(squares).sum())
    return float(squares.sum()) ** 2 / fourth if fourth > 0 else 0.0


def largest_random_square(d: int, m: int, m2: int) -> float:
    """The 99 % quantile of the largest cos² between uniform random m- and m2-dimensional subspaces of R^d.

    The squared cosines are the roots of a Jacobi (double Wishart) ensemble; the logit of the largest one follows the
    Tracy–Widom distribution of order 1 with the centring and scale of Johnstone (2008, Annals of Statistics 36, 2638).
    For a single dimension it is a Beta distribution. If m + m2 > d, the directions that must be shared (cos² = 1) are
    excluded: the remaining cosines are those between the two orthogonal complements.

    >>> round(largest_random_square(768, 64, 64), 3)
    0.324
    """
    if m + m2 > d:
        m, m2 = d - m, d - m2
    small, large = min(m, m2), max(m, m2)
    if small == 0:
        return 1.0
    if small == 1:
        from scipy.special import betaincinv

        return float(betaincinv(large / 2, (d - large) / 2, SHARED_LEVEL))
    if m + m2 == d:
        # The largest cosine is close to 1: its sine is distributed like the smallest singular value of a square random
        # matrix, P(√(m·m2)·sin θ > y) = exp(−y − y²/2) (Edelman 1988).
        y = np.sqrt(1 - 2 * np.log(SHARED_LEVEL)) - 1
        return float(1 - y**2 / (m * m2))
    gamma, phi = (2 * np.arcsin(np.sqrt((k - 0.5) / (d - 1))) for k in (small, large))
    centre = 2 * np.log(np.tan((phi + gamma) / 2))
    scale = (16 / (d - 1) ** 2 / (np.sin(phi + gamma) ** 2 * np.sin(phi) * np.sin(gamma))) ** (1 / 3)
    return float(1 / (1 + np.exp(-(centre + scale * _TRACY_WIDOM))))


def degenerate_blocks(cosines: np.ndarray, gap: float = DEGENERATE_GAP) -> list[tuple[int, ...]]:
    """For each direction, the ranks (from 1) of its block of nearly equal cosines.

    >>> degenerate_blocks(np.array([0.9, 0.5, 0.495, 0.1]))
    [(1,), (2, 3), (2, 3), (4,)]
    """
    starts: list[int] = np.flatnonzero(np.diff(cosines, prepend=np.inf) < -gap).tolist()
    blocks = [tuple(range(a + 1, b + 1)) for a, b in zip(starts, [*starts[1:], len(cosines)], strict=True)]
    return [block for block in blocks for _ in block]


def _basis(weights: AttentionWeights, name: Port | str) -> np.ndarray:
    head, role = Port.parse(name) if isinstance(name, str) else name
    weight = weights.read_head(Port(head, role))
    basis = orthonormal_basis(weight, weights.storage_dtype(role, head.layer))
    if basis.rank == 0:
        raise HeadspanError(f"the weight {head}.{role} is zero, so it spans nothing to compare")
    return basis.vectors


def _fix_signs(sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both directions of a pair with the source's largest entry positive, so that signs agree on all machines."""
    largest = np.abs(sources).argmax(axis=0)
    signs = np.sign(sources[largest, np.arange(sources.shape[1])])
    return sources * signs, targets * signs
