"""Tokens as nodes: the embedding row of a token writes at the start, and its unembedding row reads at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from headspan.checkpoints.tokenizer import Vocabulary
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.files import gather
from headspan.node_kinds.node_sets import NodeSet, Place, centred_writers
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import EMBEDDING_POSITION, UNEMBEDDING_POSITION, Role

_ID = re.compile(r"<id ([0-9]{1,9})>")
_LISTED = 4096  # up to this many tokens, names are checked for duplicates
_NEAR = 64  # gaps of up to this many rows are read rather than skipped


def token_sets(
    weights: AttentionWeights, tokens: str | Iterable[str] | None, embedding: bool, unembedding: bool
) -> list[NodeSet]:
    """The named tokens (separated by commas, spaces kept), and whole vocabularies if requested."""
    whole = {Role.W: embedding, Role.R: unembedding}
    sets: list[NodeSet] = []
    if embedding or unembedding:
        sets.append(Tokens(weights, None, [role for role, asked in whole.items() if asked]))
    if tokens is not None:
        words = tokens.split(",") if isinstance(tokens, str) else list(tokens)
        ids = [token_id(weights, word) for word in words]
        roles = [role for role, asked in whole.items() if not asked and _has(weights, role)]
        if not ids or not (roles or any(whole.values())):
            raise HeadspanError(f"{weights.reference} has neither an embedding nor an unembedding for these tokens")
        if roles:
            sets.append(Tokens(weights, ids, roles, apart=any(whole.values())))
    return sets


def _has(weights: AttentionWeights, role: Role) -> bool:
    try:
        _rows(weights, role, slice(0, 1))
    except HeadspanError:
        return False
    return True


def _rows(weights: AttentionWeights, role: Role, rows: slice) -> np.ndarray:
    read = weights.embedding_rows if role is Role.W else weights.unembedding_rows
    return read(rows.start, rows.stop)


def token_id(weights: AttentionWeights, word: str) -> int:
    """The id of a text that is one token; raises with its tokens otherwise."""
    size, vocabulary = weights.vocab_size or 0, weights.vocabulary()
    if not size:
        raise HeadspanError(f"{weights.reference} has neither an embedding nor an unembedding, so it has no tokens")
    match = _ID.fullmatch(str(word).strip())
    if match:
        if int(match[1]) >= size:
            raise HeadspanError(f"{weights.reference} has {size} tokens, so there is no token {int(match[1])}")
        return int(match[1])
    if not isinstance(word, str) or not word:
        raise HeadspanError(f"{word!r} is not a token: write a text such as ' Paris', or <id 42>")
    if vocabulary is None:
        raise HeadspanError(f"{weights.reference} has no tokenizer: give tokens by id, <id 42>")
    found = _look_up(vocabulary, word)
    if len(found) == 1 and found[0] < size:
        return found[0]
    if len(found) == 1:
        raise HeadspanError(f"the token {word!r} has the id {found[0]}, but {weights.reference} has {size} rows")
    pieces = " ".join(vocabulary.readable(i) for i in found)
    what = f"it consists of {len(found)}: {pieces}" if found else "its tokenizer has no such text"
    hint = "" if word.startswith(" ") else f"; with a leading space it may be one ({' ' + word!r})"
    raise HeadspanError(f"{word!r} is not one token of {weights.reference}: {what}{hint}")


def _look_up(vocabulary: Vocabulary, word: str) -> list[int]:
    """The ids of a text. If it is not one token or cannot be encoded, look for a token that is displayed like it.

    Text that the tokenizer does not know would become its unknown token, which is not what was asked for.
    """
    try:
        found = vocabulary.encode(word)
    except HeadspanError:
        found = []
    known = [i for i in found if i not in vocabulary.unknown]
    if len(found) == 1 and known:
        return found
    shown = word.replace(" ", "_")
    same = [i for i in range(vocabulary.size) if vocabulary.readable(i) == shown]
    return same[:1] or (found if known else [])


class Tokens(NodeSet):
    """Rows of the embedding (W) and the unembedding (R)."""

    kind = "token"

    def __init__(
        self, weights: AttentionWeights, ids: list[int] | None, roles: list[Role], apart: bool = False
    ) -> None:
        self._weights, self.d_model = weights, weights.d_model
        for role in roles:
            _rows(weights, role, slice(0, 1))  # raises if there is none
        self.population = weights.vocab_size or 0
        self.ids = range(self.population) if ids is None else np.array(list(dict.fromkeys(ids)), dtype=np.int64)
        self.label = f"the vocabulary of {weights.reference}"
        self.notes = []
        places = {Role.W: Place(EMBEDDING_POSITION, -1), Role.R: Place(UNEMBEDDING_POSITION, weights.n_layers)}
        self.places = {role: places[role] for role in roles}
        self._vocabulary, self._all, self._apart = weights.vocabulary(), ids is None, apart
        names = [self._shown(int(i)).upper() for i in self.ids] if len(self.ids) <= _LISTED else []
        self._twice = {name for name, count in Counter(names).items() if count > 1}  # names that differ only in case
        folded = weights.folding != "none" and weights.norm_kind == "layer"
        self.centred_roles = centred_writers(weights) | ({Role.R} if folded else set())

    @property
    def stem(self) -> str:
        return "token"

    def _shown(self, number: int) -> str:
        shown = f"<id {number}>" if self._vocabulary is None else self._vocabulary.readable(number)
        return shown if shown.strip() else f"<id {number}>"

    def name(self, number: int) -> str:
        shown = self._shown(number)
        if shown.upper() in self._twice:
            shown = f"{shown} <id {number}>"
        if self._apart:  # together with the whole vocabulary of the other port
            return f"{shown} (embedding)" if Role.W in self.places else f"{shown} (unembedding)"
        return shown

    def find(self, name: str) -> int | None:
        if self._all:
            match = _ID.fullmatch(name.strip())
            return int(match[1]) if match and int(match[1]) < self.population else None
        return super().find(name)

    def width(self, role: Role) -> int:
        return 1

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        rows = gather(ids, lambda run: _rows(self._weights, role, run), _NEAR)[:, :, None]
        return self.centre(role, rows) if role is Role.W else rows  # folded unembeddings are already centred
