"""The tokens of a tokenizer, by id, in a readable form for tables.

Only the list of tokens is needed, so tokenizer files are parsed here, as plain JSON, text or protobuf; the
`tokenizers` package is loaded only to encode text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from headspan.checkpoints.sentencepiece_file import read_pieces
from headspan.checkpoints.untrusted import open_regular, read_json, reason
from headspan.vocabulary.errors import HeadspanError

Style = Literal["byte-level", "sentencepiece", "plain"]
Encoder = Callable[[], Any]  # creates a tokenizers.Tokenizer

# Files that a tokenizer may consist of, to fetch from a hub repository, in order of preference.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "added_tokens.json",
    "tokenizer_config.json",
)

_NOT_KNOWN = ("<unk>", "[unk]", "<|unk|>", "<unknown>")
_MAX_TOKENS = 10_000_000  # the largest real vocabularies have 262,144; an untrusted id must not fill the memory
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ID = re.compile(r"[0-9]{1,9}")
_GGUF_PADDING = re.compile(r"\[PAD\d+\]")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

# Token types of SentencePiece, which GGUF also uses.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5


class Vocabulary:
    """The tokens of a model, by id.

    >>> v = Vocabulary({0: "Ġthe", 1: "Ċ", 2: "<|end|>", 4: "ðŁ"}, "byte-level", special={2})
    >>> [v.readable(i) for i in range(5)]
    ['_the', '\\\\n', '<|end|>', '<id 3>', '\\\\xf0\\\\x9f']
    """

    def __init__(
        self,
        tokens: Mapping[int, str],
        style: Style,
        *,
        special: Iterable[int] = (),
        added: Iterable[int] = (),
        encoder: Encoder | None = None,
        start: int | None = None,
    ) -> None:
        """``added`` tokens are plain text in every style; ``special`` tokens are added tokens too."""
        if any(not 0 <= i < _MAX_TOKENS for i in tokens):
            raise HeadspanError(f"a tokenizer has token ids outside 0…{_MAX_TOKENS - 1}: it is not a real one")
        self.style: Style = style
        self.special_ids = frozenset(special)
        self._added = frozenset(added) | self.special_ids
        self._tokens = dict(tokens)
        self._encoder = encoder
        self._tokenizer: Any = None
        self._start = start

    @property
    def size(self) -> int:
        """One more than the largest id; a padded unembedding may have more rows."""
        return max(self._tokens, default=-1) + 1

    @cached_property
    def unknown(self) -> frozenset[int]:
        """Tokens for text that the tokenizer does not know."""
        return frozenset(i for i, token in self._tokens.items() if token.lower() in _NOT_KNOWN)

    def raw(self, token_id: int) -> str:
        """The token as stored in the tokenizer, or ``<id N>`` if it has none."""
        return self._tokens.get(int(token_id), f"<id {int(token_id)}>")

    def text(self, token_id: int) -> str:
        """The text that a token stands for, with lone bytes escaped."""
        token_id = int(token_id)
        token = self._tokens.get(token_id)
        if token is None:
            return f"<id {token_id}>"
        if token_id in self._added or self.style == "plain":
            return token
        if self.style == "byte-level":
            return _decode_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            value = int(byte[1], 16)
            return _ESCAPES.get(chr(value), f"\\x{value:02x}")
        return token.replace("▁", " ")

    def readable(self, token_id: int) -> str:
        """The token for a table: spaces as ``_``, control characters and lone bytes escaped."""
        return self.text(token_id) if int(token_id) not in self._tokens else escape(self.text(token_id))

    @property
    def start_id(self) -> int | None:
        """The special token that the tokenizer puts before every text, as in training, or None."""
        if self._start is not None or self._encoder is None:
            return self._start
        alone = self._ids("a", special=False)
        dressed = self._ids("a", special=True)
        first = dressed[0] if dressed and dressed[: len(alone)] != alone else None
        return first if first in self.special_ids else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._encoder is None:
            raise HeadspanError("this tokenizer cannot encode text: its files hold only the list of tokens")
        try:
            if self._tokenizer is None:
                self._tokenizer = self._encoder()
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except (KeyboardInterrupt, SystemExit, HeadspanError):
            raise
        except BaseException as error:  # the Rust library signals a panic outside Exception
            raise HeadspanError(f"the tokenizer could not be used to encode text: {reason(error)}") from None

    @classmethod
    def from_directory(cls, directory: Path) -> Vocabulary | None:
        """The vocabulary of a checkpoint directory, or None if it has no known tokenizer file."""
        if (directory / "tokenizer.json").is_file():
            return cls.from_tokenizer_json(directory / "tokenizer.json")
        if (directory / "vocab.json").is_file():
            return cls.from_vocab_json(directory / "vocab.json")
        if (directory / "tokenizer.model").is_file():
            return cls.from_sentencepiece(directory / "tokenizer.model")
        if (directory / "vocab.txt").is_file():
            return cls.from_vocab_txt(directory / "vocab.txt")
        return None

    @classmethod
    def from_tokenizer_json(cls, path: Path) -> Vocabulary:
        """From a file of the `tokenizers` package: BPE, byte-level BPE, Unigram, WordPiece or WordLevel."""

        def load() -> Any:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))

        return cls.from_json(read_json(path), path, load)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], path: Path | str, load: Encoder) -> Vocabulary:
        """From the content of such a file; load: creates the same tokenizer."""
        model = content.get("model")
        entries = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(entries, list):  # Unigram: [[token, log-probability], …]
            pairs = ((e[0] if isinstance(e, list) and e else e, i) for i, e in enumerate(entries))
        elif isinstance(entries, dict):
            pairs = entries.items()
        else:
            raise HeadspanError(f"{path} has no model vocabulary: it is not a file of the tokenizers package")
        added, special = _added_tokens(content.get("added_tokens"), path)
        assert isinstance(model, dict)
        style = _style_of_tokenizer_json(content, model)

        def encoder() -> Any:
            tokenizer = load()
            tokenizer.no_padding()  # sentence encoders store a fixed length in the file
            tokenizer.no_truncation()
            return tokenizer

        return cls(_by_id(pairs, path) | added, style, special=special, added=added, encoder=encoder)

    @classmethod
    def from_vocab_json(cls, path: Path) -> Vocabulary:
        """From the older pair vocab.json and merges.txt (byte-level BPE: GPT-2, RoBERTa, OPT, Qwen2)."""
        tokens = _by_id(read_json(path).items(), path)
        added, special = _older_added_tokens(path.parent)
        merges = path.parent / "merges.txt"

        def encoder() -> Any:
            from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

            tokenizer = Tokenizer(models.BPE.from_file(str(path), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
            tokenizer.add_special_tokens([AddedToken(added[i], normalized=False) for i in sorted(special)])
            return tokenizer

        style = _guess_style(tokens.values())
        can_encode = merges.is_file() and style == "byte-level"
        start = _configured_start(path.parent, tokens | added)
        usable = encoder if can_encode else None
        return cls(tokens | added, style, special=special, added=added, encoder=usable, start=start)

    @classmethod
    def from_vocab_txt(cls, path: Path) -> Vocabulary:
        """From a WordPiece list: one token per line, ``##`` before a continuation of a word."""
        open_regular(path)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise HeadspanError(f"{path} cannot be read as a list of tokens: {reason(error)}") from None
        if lines and not lines[-1]:
            lines.pop()
        tokens = {i: line.rstrip("\r") for i, line in enumerate(lines)}
        added, special = _older_added_tokens(path.parent)
        brackets = {i for i, token in tokens.items() if token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
        settings = path.parent / "tokenizer_config.json"
        lowercase = not settings.is_file() or read_json(settings).get("do_lower_case", True) is not False

        def encoder() -> Any:
            from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

            return BertWordPieceTokenizer(vocab={t: i for i, t in tokens.items()}, lowercase=lowercase)

        return cls(tokens | added, "plain", special=special | brackets, added=added, encoder=encoder)

    @classmethod
    def from_sentencepiece(cls, path: Path) -> Vocabulary:
        """From a SentencePiece ``tokenizer.model``; such a vocabulary cannot encode."""
        pieces = read_pieces(path)
        tokens = {i: piece.text for i, piece in enumerate(pieces)}
        added, special = _older_added_tokens(path.parent)
        plain, control = _by_type([piece.type for piece in pieces])
        start = _configured_start(path.parent, tokens | added)
        return cls(tokens | added, "sentencepiece", special=special | control, added=plain | added.keys(), start=start)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary | None:
        """From GGUF metadata as plain values (``tokenizer.ggml.tokens``, ``.token_type``, ``.model`` …)."""
        from headspan.checkpoints.gguf.encoder import gguf_encoder

        entries = metadata.get("tokenizer.ggml.tokens")
        if entries is None:
            return None
        if isinstance(entries, (str, bytes)) or not isinstance(entries, Sequence):
            raise HeadspanError("this GGUF file has a tokenizer.ggml.tokens that is not a list of tokens")
        texts = (t.decode("utf-8", "backslashreplace") if isinstance(t, bytes) else t for t in entries)
        tokens = _by_id(((text, i) for i, text in enumerate(texts)), "tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type")
        types = [t if isinstance(t, int) else 0 for t in types] if isinstance(types, Sequence) else []
        plain, special = _by_type(types)
        # Converters fill the ids between the tokenizer's size and the unembedding's with [PAD…].
        for i, kind in enumerate(types[: len(tokens)]):
            if kind == _UNUSED and _GGUF_PADDING.fullmatch(tokens[i]):
                del tokens[i]
        style = _GGUF_STYLES.get(str(metadata.get("tokenizer.ggml.model"))) or _guess_style(tokens.values())
        encoder = gguf_encoder(metadata, tokens, plain | special) if style == "byte-level" else None
        start = metadata.get("tokenizer.ggml.bos_token_id")
        adds = metadata.get("tokenizer.ggml.add_bos_token", style == "sentencepiece")  # as llama.cpp assumes
        start = start if adds is True and isinstance(start, int) and start in tokens else None
        ends = {"special": special & tokens.keys(), "added": plain & tokens.keys()}
        return cls(tokens, style, **ends, encoder=encoder, start=start)


# llama.cpp marks the start of a word with ▁ for WordPiece ("bert") and Unigram ("t5") too.
_GGUF_STYLES: dict[str, Style] = {
    "gpt2": "byte-level",
    "llama": "sentencepiece",
    "t5": "sentencepiece",
    "bert": "sentencepiece",
    "rwkv": "plain",
}


def escape(text: str) -> str:
    r"""Replace spaces with ``_`` and escape what does not print: bytes as ``\x07``, characters as ``\u200b``.

    >>> print(escape(" a\n\x07\u200b"))
    _a\n\x07\u200b
    """
    return "".join(_escape_character(c) for c in text)


def _escape_character(c: str) -> str:
    if c == " ":
        return "_"
    if c.isprintable():
        return c
    if c in _ESCAPES:
        return _ESCAPES[c]
    code = ord(c)
    # \x stands for one byte; a character above ASCII is several bytes and gets \u, so the two never mix.
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes map to themselves, the others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _decode_bytes(token: str) -> str:
    alphabet = _byte_of_character()
    if any(c not in alphabet for c in token):
        return token  # an added token that the tokenizer does not declare
    return bytes(alphabet[c] for c in token).decode("utf-8", "backslashreplace")


def _by_id(pairs: Iterable[tuple[Any, Any]], where: Path | str) -> dict[int, str]:
    """Tokens by id from (token, id) pairs, after checking that tokens are text and ids are integers."""
    tokens: dict[int, str] = {}
    for token, i in pairs:
        if isinstance(i, bool) or not isinstance(i, int) or not isinstance(token, str):
            raise HeadspanError(
                f"{where} has the entry {repr(token)[:80]}: {repr(i)[:80]} where a token and its id should be"
            )
        tokens[i] = token
    return tokens


def _added_tokens(entries: Any, where: Path | str) -> tuple[dict[int, str], set[int]]:
    """Added tokens by id and the ids of the special ones, from [{"id", "content", "special"}, …]."""
    if entries is None:
        return {}, set()
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise HeadspanError(f"{where} has added tokens that are not a list of objects")
    added = _by_id(((e.get("content"), e.get("id")) for e in entries), where)
    return added, {e["id"] for e in entries if e.get("special")}


def _older_added_tokens(directory: Path) -> tuple[dict[int, str], set[int]]:
    """The same from added_tokens.json and tokenizer_config.json, which come with the older files."""
    added: dict[int, str] = {}
    special: set[int] = set()
    path = directory / "added_tokens.json"
    if path.is_file():
        added |= _by_id(read_json(path).items(), path)
    path = directory / "tokenizer_config.json"
    entries = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    if isinstance(entries, dict):
        listed = [{"id": int(i), **e} for i, e in entries.items() if _ID.fullmatch(i) and isinstance(e, dict)]
        more, special = _added_tokens(listed, path)
        added |= more
    return added, special


def _configured_start(directory: Path, tokens: Mapping[int, str]) -> int | None:
    """The token that tokenizer_config.json puts before every text."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    name = settings.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if settings.get("add_bos_token") is not True or not isinstance(name, str):
        return None
    return next((i for i, token in tokens.items() if token == name), None)


def _by_type(types: Sequence[int]) -> tuple[set[int], set[int]]:
    """Ids of plain-text tokens and of control tokens, from SentencePiece token types."""
    plain = {i for i, kind in enumerate(types) if kind in (_UNKNOWN, _USER_DEFINED)}
    return plain, {i for i, kind in enumerate(types) if kind == _CONTROL}


def _style_of_tokenizer_json(content: Mapping[str, Any], model: Mapping[str, Any]) -> Style:
    steps = [content.get("pre_tokenizer"), content.get("decoder")]
    if any(_mentions(step, "ByteLevel") for step in steps):
        return "byte-level"
    kind = model.get("type") or ("BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "")
    return "sentencepiece" if kind in ("BPE", "Unigram") else "plain"


def _mentions(step: Any, kind: str, depth: int = 0) -> bool:
    """Whether a pre-tokenizer or decoder, or one in its sequence, is of this kind."""
    if not isinstance(step, dict) or depth > 8:
        return False
    lists = [step.get(key) for key in ("pretokenizers", "decoders")]
    inner = [part for parts in lists if isinstance(parts, list) for part in parts]
    return step.get("type") == kind or any(_mentions(part, kind, depth + 1) for part in inner)


def _guess_style(tokens: Iterable[str]) -> Style:
    """The style, from the mark that most word-initial tokens have."""
    tokens = list(tokens)
    bytes_like = sum(t.startswith("Ġ") for t in tokens)
    pieces_like = sum(t.startswith("▁") for t in tokens)
    if not bytes_like and not pieces_like:
        return "plain"
    return "byte-level" if bytes_like >= pieces_like else "sentencepiece"
