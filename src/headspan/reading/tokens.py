"""The tokens of a head: how much of each token's unembedding vector lies in the head's subspace.

W̃ is LN_final applied to each column of a head's d×m weight. The score of token t is ‖P̃ f(e_t)‖, where P̃ projects on
the span of W̃ and f is one of four preprocessings. With an orthonormal basis U of that span the score is ‖Uᵀ f(e_t)‖,
so concatenating the bases of many heads turns a block of the vocabulary into one large matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headspan.reading.token_lengths import (
    DEFAULT_MEMORY,
    MAX_BLOCK,
    Stack,
    VocabularyRows,
    chosen_stacks,
    head_stack,
    head_stacks,
    parse_preprocess,
    reciprocal,
    row_norms,
)
from headspan.results.tabular import Tabular
from headspan.scoring.inputs import given_weights
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.memory import parse_memory
from headspan.system.ordering import Best, mean_ranks, shared_ranks
from headspan.system.progress import Update
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import ROLES, Head, Port, Role

if TYPE_CHECKING:
    from headspan.models.opening import ModelLike
    from headspan.models.weights import AttentionWeights

Readable = Callable[[int], str]

_TABLE_ROWS = ("identity", "centre", "normalise", "centre_normalise")
_TABLE_COLUMNS = (*(role.value for role in ROLES), "all")
NormTable = dict[str, dict[str, tuple[float, float]]]


class Token(NamedTuple):
    """One token and its score; ``token`` is readable text (spaces as ``_``), or ``<id N>`` without a tokenizer."""

    id: int
    token: str
    score: float


class TokenList(Tabular, list[Token]):
    """Tokens, best first."""

    def rows(self) -> list[dict[str, Any]]:
        """rank, id, token, score of each token."""
        ranks = shared_ranks(np.array([token.score for token in self])).tolist()
        return [{"rank": rank, **token._asdict()} for rank, token in zip(ranks, self, strict=True)]

    def _headline(self) -> str:
        return f"{len(self)} tokens"


class HeadTokens(NamedTuple):
    """The best tokens of one role of one head, best first."""

    head: Head
    role: Role
    tokens: list[Token]


@renamed(weights="model")
@checked
def tokens(
    model: ModelLike,
    head: Head | str,
    role: Role | str | None = None,
    k: int = 10,
    preprocess: str = "centre-normalise",
) -> TokenList:
    """The k tokens whose preprocessed unembedding vectors lie most in the subspace of one head.

    model: opened weights or a model reference. head: ``"L10H6"``, or ``"L10H6.K"`` with its role (O by default).

    >>> from headspan.models.opening import open
    >>> axes = np.eye(6)[None, None, :, 1:3]
    >>> weights = open({**{role: axes for role in "QKVO"}, "unembedding": np.eye(6)})
    >>> [token.id for token in tokens(weights, "L0H0", "O", k=2)]
    [1, 2]
    """
    head, role = head_and_role(head, role)
    opened = given_weights(model)
    found = opened.ports.resolve(head, role)
    search = _Search(VocabularyRows.unembedding(opened), k, preprocess)
    return TokenList(search.best(head_stack(opened, found, role), reader(opened))[0].tokens)


def head_and_role(head: Head | str, role: Role | str | None) -> tuple[Head, Role]:
    """A head and its role, which may be part of its name.

    >>> head_and_role("L10H6.k", None)[1]
    <Role.K: 'K'>
    """
    name, dot, written = (head, "", "") if isinstance(head, Head) else head.partition(".")
    if dot and role is not None and written.upper() != str(role).upper():
        raise HeadspanError(f"{head} names the role {written}, but {role} is asked for: give one of them")
    return Head.parse(name), parse_role(written if dot else "O" if role is None else role)


@checked
def all_tokens(
    model: ModelLike,
    roles: Sequence[Role | str] = ROLES,
    k: int = 10,
    preprocess: str = "centre-normalise",
    progress: Update | None = None,
    memory: int | str = DEFAULT_MEMORY,
) -> list[HeadTokens]:
    """The same for every head of some roles: role by role, heads in layer order.

    ``memory`` bounds the working arrays: the vocabulary is read block by block, and a large model's heads are
    taken a few layers at a time. ``progress(done, total)`` counts products of a head with a token.
    """
    budget = parse_memory(memory)
    weights = given_weights(model)
    roles = [parse_role(role) for role in roles]
    rows = VocabularyRows.unembedding(weights, budget // 2)
    search = _Search(rows, k, preprocess, budget // 4, progress, sum(len(weights.heads(role)) for role in roles))
    readable = reader(weights)
    return [tokens for stack in head_stacks(weights, roles, budget // 4) for tokens in search.best(stack, readable)]


def tokens_of(
    weights: AttentionWeights,
    ports: Sequence[Port],
    rows: VocabularyRows,
    k: int = 10,
    preprocess: str = "centre-normalise",
    progress: Update | None = None,
) -> list[HeadTokens]:
    """The best tokens of some weights of some heads, with one pass over the vocabulary."""
    stacks = chosen_stacks(weights, ports)
    best = [Best(len(stack.heads), check_count(k)) for stack in stacks]
    readable, done = reader(weights), 0
    for start, block in rows.preprocessed(preprocess, MAX_BLOCK):
        for stack, found in zip(stacks, best, strict=True):
            found.update(start, stack.squared_norms(block @ stack.bases))
        done += len(block)
        if progress is not None:
            progress(done, rows.size)
    listed: list[HeadTokens] = []
    for stack, found in zip(stacks, best, strict=True):
        found.scores = np.sqrt(found.scores)
        named = zip(stack.heads, readable_tokens(found, readable), strict=True)
        listed += [HeadTokens(head, stack.role, tokens) for head, tokens in named]
    return listed


def random_best(d: int, m: int, n_tokens: int) -> float:
    """The median score of the best of n independent unit vectors in a random m-dimensional subspace.

    The squared length of the projection of a unit vector follows Beta(m/2, (d − m)/2). If a head's best tokens score no
    more than this, they are not informative.

    >>> round(random_best(576, 64, 49_152), 2)
    0.45
    """
    from scipy.special import betaincinv

    if m >= d:
        return 1.0
    return float(np.sqrt(betaincinv(m / 2, (d - m) / 2, 0.5 ** (1 / n_tokens))))


def norm_correlations(
    weights: AttentionWeights, progress: Update | None = None, memory: int | str = DEFAULT_MEMORY
) -> NormTable:
    """Spearman ρ over tokens between the length of a token's vector and the length of its projection on a head.

    For each preprocessing, role (and "all"): mean and standard deviation over heads (numpy's, ddof = 0). The length
    is ‖e_t‖, or ‖e_t − ē‖ if the preprocessing centres. All four come from one product UᵀE, because centring is linear
    and normalising only divides.
    """
    budget = parse_memory(memory)
    rows = VocabularyRows.unembedding(weights, budget // 4)
    lengths = _lengths(rows)
    columns: dict[str, dict[str, list[float]]] = {}
    done, total = 0, sum(len(weights.heads(role)) for role in ROLES)
    for stack in head_stacks(weights, ROLES, _stack_memory(weights, rows.size, budget // 2)):
        for name, values in _stack_correlations(stack, rows, lengths, budget // 4).items():
            for role in (stack.role.value, "all"):
                columns.setdefault(name, {}).setdefault(role, []).extend(values)
        done += len(stack.heads)
        if progress is not None:
            progress(done, total)
    return {
        name: {
            role: (float(np.mean(columns[name][role])), float(np.std(columns[name][role]))) for role in _TABLE_COLUMNS
        }
        for name in _TABLE_ROWS
    }


def unembedding_cosines(weights: AttentionWeights) -> dict[str, float | None]:
    """Mean cosine of the unembedding vectors with their mean and with the bias of the final norm.

    Keys ``e_with_mean``, ``e_with_beta_final``, ``mean_with_beta_final``; the last two are None if the final
    norm has no bias or a zero bias. Vectors of length 0 have no direction and are left out.
    """
    rows = VocabularyRows.unembedding(weights)
    norm = weights.final_norm()
    mean = rows.mean
    beta = None if norm is None or norm.bias is None or not norm.bias.any() else norm.bias.astype(np.float64)
    names = ["e_with_mean"] if beta is None else ["e_with_mean", "e_with_beta_final"]
    directions = np.stack([_unit(v) for v in (mean, beta) if v is not None], axis=1)
    sums, count = np.zeros(len(names)), 0
    for _, block in rows.preprocessed("normalise", MAX_BLOCK):
        sums += (block @ directions).sum(axis=0)
        count += int(np.count_nonzero(block.any(axis=1)))
    found: dict[str, float | None] = {"e_with_mean": None, "e_with_beta_final": None, "mean_with_beta_final": None}
    found.update(zip(names, map(float, sums / max(count, 1)), strict=True))
    if beta is not None:
        found["mean_with_beta_final"] = float(_unit(mean) @ _unit(beta))
    return found


def parse_role(role: Role | str) -> Role:
    if str(role).upper() not in Role.__members__:
        raise HeadspanError(f"unknown role {role!r}: choose Q, K, V or O")
    return Role(str(role).upper())


def reader(weights: AttentionWeights) -> Readable:
    """A function from token ids to readable text, or to ``<id N>`` without a tokenizer."""
    vocabulary = weights.vocabulary()
    return "<id {}>".format if vocabulary is None else vocabulary.readable


class _Search:
    """The best tokens of successive stacks of heads, with one progress count."""

    def __init__(
        self,
        rows: VocabularyRows,
        k: int,
        preprocess: str,
        memory: int = DEFAULT_MEMORY // 4,
        progress: Update | None = None,
        n_heads: int = 1,
    ) -> None:
        parse_preprocess(preprocess)  # report a bad name before reading anything
        self.rows, self.k, self.preprocess, self.memory = rows, check_count(k), preprocess, memory
        self._progress, self._done, self._total = progress, 0, rows.size * n_heads

    def best(self, stack: Stack, readable: Readable) -> list[HeadTokens]:
        best = Best(len(stack.heads), self.k)
        for start, block in self.rows.preprocessed(self.preprocess, stack.block_rows(self.memory)):
            best.update(start, stack.squared_norms(block @ stack.bases))
            self._done += len(block) * len(stack.heads)
            if self._progress is not None:
                self._progress(self._done, self._total)
        best.scores = np.sqrt(best.scores)
        return [HeadTokens(h, stack.role, t) for h, t in zip(stack.heads, readable_tokens(best, readable), strict=True)]


def check_count(k: int) -> int:
    if k < 1:
        raise HeadspanError(f"the number of tokens to show must be at least 1, not {k}")
    return k


def readable_tokens(best: Best, readable: Readable) -> list[list[Token]]:
    """The best tokens of each column, best first."""
    return [
        [Token(int(i), readable(int(i)), float(score)) for i, score in zip(ids, scores, strict=True)]
        for ids, scores in zip(best.ids, best.scores, strict=True)
    ]


def _unit(vector: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector)
    return vector / length if length else vector


def _stack_memory(weights: AttentionWeights, tokens: int, memory: int) -> int:
    """Bytes available for bases, so that bases and the scores of all tokens fit into memory."""
    # Per head, 4·d·m bytes for the basis and 8 bytes of scores per token; ranking one head at a time adds little.
    widest = max(weights.d_head(role) for role in ROLES)
    basis = 4 * weights.d_model * widest
    return int(memory * basis / (basis + 8 * tokens))


def _lengths(rows: VocabularyRows) -> tuple[np.ndarray, np.ndarray]:
    """‖e_t‖ and ‖e_t − ē‖ of all tokens."""
    found = [[row_norms(block) for _, block in rows.preprocessed(f, MAX_BLOCK)] for f in ("identity", "centre")]
    return np.concatenate(found[0]), np.concatenate(found[1])


def _stack_correlations(
    stack: Stack, rows: VocabularyRows, lengths: tuple[np.ndarray, np.ndarray], memory: int
) -> dict[str, list[float]]:
    mean = (rows.mean @ stack.bases).astype(np.float32)
    raw, centred = (np.empty((rows.size, len(stack.heads)), dtype=np.float32) for _ in range(2))
    for start, block in rows.blocks(stack.block_rows(memory)):
        projected = block @ stack.bases
        part = slice(start, start + len(block))
        raw[part] = stack.squared_norms(projected)
        projected -= mean
        centred[part] = stack.squared_norms(projected)
    found: dict[str, list[float]] = {}
    for name, squares, length in (("identity", raw, lengths[0]), ("centre", centred, lengths[1])):
        ranks, inverse = _centred_ranks(length), reciprocal(length)
        projected_norms = [np.sqrt(column) for column in squares.T]
        normalised = "normalise" if name == "identity" else "centre_normalise"
        found[name] = [_correlation(ranks, _centred_ranks(p)) for p in projected_norms]
        found[normalised] = [_correlation(ranks, _centred_ranks(p * inverse)) for p in projected_norms]
    return found


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    ranks = mean_ranks(values)
    return ranks - ranks.mean()


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson correlation of centred ranks, which is Spearman's ρ; NaN if one of them is constant."""
    # einsum rather than @: starting BLAS threads would cost more than such a short product.
    both, one, other = (np.einsum("t,t->", a, b) for a, b in ((first, second), (first, first), (second, second)))
    return float(both / np.sqrt(one * other)) if one * other > 0 else float("nan")
