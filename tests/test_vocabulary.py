"""Readable tokens, against the tokenizers themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headspan.checkpoints.tokenizer import Vocabulary, escape
from headspan.vocabulary.errors import HeadspanError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\nand a line, 1234 digits, naïve café 你好 🙂\t",
    "def f(x):\n    return x ** 2  # ok\n",
    "We're don't I'LL",
]


def byte_level_bpe(directory: Path) -> Any:
    """A byte-level BPE tokenizer trained on the spot, with one special and one ordinary added token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def sentencepiece_like(directory: Path, model: str) -> Any:
    """A BPE or Unigram tokenizer in SentencePiece's manner, with byte tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    if model == "bpe":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        trainer: Any = trainers.BpeTrainer(vocab_size=600, special_tokens=special + bytes_, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def test_byte_level_tokens_read_as_the_text_they_decode_to(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe(tmp_path)
    vocabulary = Vocabulary.from_directory(tmp_path)
    assert vocabulary is not None
    assert vocabulary.size == tokenizer.get_vocab_size(with_added_tokens=True)
    whole = 0
    for i in range(vocabulary.size):
        decoded = tokenizer.decode([i], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" not in decoded:
            assert vocabulary.readable(i) == escape(decoded)
            whole += 1
        else:
            assert "\\x" in vocabulary.readable(i)
    assert whole > 200
    assert vocabulary.readable(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert vocabulary.readable(tokenizer.token_to_id("    ")) == "____"
    assert vocabulary.special_ids == {tokenizer.token_to_id("<|end|>")}


def test_marks_of_space_control_characters_and_lone_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe(tmp_path)
    vocabulary = Vocabulary.from_tokenizer_json(tmp_path / "tokenizer.json")
    shown = {vocabulary.raw(i): vocabulary.readable(i) for i in range(vocabulary.size)}
    assert shown["Ġ"] == "_"
    assert shown["Ċ"] == r"\n"
    assert shown["ĉ"] == r"\t"
    assert shown["ð"] == r"\xf0"
    assert shown["Ġthe"] == "_the"
    assert shown[tokenizer.id_to_token(tokenizer.encode("\x00").ids[0])] == r"\x00"


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_sentencepiece_tokens(tmp_path: Path, model: str) -> None:
    tokenizer = sentencepiece_like(tmp_path, model)
    vocabulary = Vocabulary.from_directory(tmp_path)
    assert vocabulary is not None
    assert vocabulary.style == "sentencepiece"
    shown = {vocabulary.raw(i): vocabulary.readable(i) for i in range(vocabulary.size)}
    words = [token for token in shown if token.startswith("▁") and token[1:].isalpha()]
    assert words
    assert all(shown[word] == word.replace("▁", "_") for word in words)
    assert shown["<s>"] == "<s>"
    if model == "bpe":
        # They are declared special here, as in Llama's file they are ordinary: take the mark away to see them.
        plain = Vocabulary({0: "<0x0A>", 1: "<0x9F>", 2: "<0x41>"}, "sentencepiece")
        assert [plain.readable(i) for i in range(3)] == [r"\n", r"\x9f", r"\x41"]
    for text in TEXTS[:1]:
        assert vocabulary.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_wordpiece_of_a_real_model(minilm_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    vocabulary = Vocabulary.from_directory(minilm_dir)
    assert vocabulary is not None
    assert vocabulary.size == tokenizer.get_vocab_size() == 30522
    assert all(vocabulary.raw(i) == tokenizer.id_to_token(i) for i in range(vocabulary.size))
    shown = {vocabulary.raw(i): vocabulary.readable(i) for i in range(vocabulary.size)}
    assert shown["##ing"] == "##ing"
    assert shown["[CLS]"] == "[CLS]"
    older = Vocabulary.from_vocab_txt(minilm_dir / "vocab.txt")
    assert [older.readable(i) for i in range(older.size)] == [vocabulary.readable(i) for i in range(vocabulary.size)]
    for text in TEXTS:
        assert older.encode(text) == vocabulary.encode(text)
        padded = tokenizer.encode(text, add_special_tokens=False).ids  # this file pads to a fixed length
        assert vocabulary.encode(text) == padded[: len(vocabulary.encode(text))]
        assert len(vocabulary.encode(text)) < len(padded)


@pytest.mark.slow
def test_gguf_vocabulary_of_a_real_model(smollm2_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    import headspan

    vocabulary = headspan.open(str(smollm2_gguf)).vocabulary()
    assert vocabulary is not None
    reference = transformers.AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    assert vocabulary.size == len(reference) == 49152
    assert vocabulary.readable(0) == "<|endoftext|>"
    assert {0, 1, 2} <= vocabulary.special_ids
    for i in random.Random(0).sample(range(17, 49152), 3000):
        decoded = reference.decode([i], clean_up_tokenization_spaces=False)
        if "\N{REPLACEMENT CHARACTER}" not in decoded:
            assert vocabulary.readable(i) == escape(decoded)
    for text in TEXTS:
        assert vocabulary.encode(text) == reference.encode(text, add_special_tokens=False)


def test_older_vocab_json_and_merges(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe(tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    tokenizer.model.save(str(old))
    (old / "added_tokens.json").write_text(json.dumps({"<|extra|>": 1000}))
    decoder = {"0": {"content": "<|end|>", "special": True}}
    (old / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    vocabulary = Vocabulary.from_directory(old)
    assert vocabulary is not None
    assert vocabulary.readable(1000) == "<|extra|>"
    assert vocabulary.readable(999) == "<id 999>"
    assert vocabulary.special_ids == {0}
    newer = Vocabulary.from_directory(tmp_path / "new")
    assert newer is not None
    assert [vocabulary.readable(i) for i in range(300)] == [newer.readable(i) for i in range(300)]
    assert vocabulary.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0], add_special_tokens=False).ids


def test_sentencepiece_model_file(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=330, model_type="bpe",
        byte_fallback=True, user_defined_symbols=["<user>"], minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    (tmp_path / "tokenizer.vocab").unlink()
    vocabulary = Vocabulary.from_directory(tmp_path)
    assert vocabulary is not None
    assert vocabulary.size == processor.get_piece_size()
    assert [vocabulary.raw(i) for i in range(330)] == [processor.id_to_piece(i) for i in range(330)]
    assert vocabulary.special_ids == {i for i in range(330) if processor.is_control(i)}
    shown = {vocabulary.raw(i): vocabulary.readable(i) for i in range(330)}
    assert shown["<user>"] == "<user>"
    assert shown["<0x0A>"] == r"\n"
    words = [token for token in shown if token.startswith("▁") and token[1:].isalpha()]
    assert words
    assert all(shown[word] == word.replace("▁", "_") for word in words)
    with pytest.raises(HeadspanError, match="cannot encode"):
        vocabulary.encode("a")


def test_gguf_metadata() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "<0x0A>", "▁the", "x y", b"\xff", "[PAD6]"],
        "tokenizer.ggml.token_type": [2, 3, 6, 1, 4, 1, 5],
    }
    vocabulary = Vocabulary.from_gguf(metadata)
    assert vocabulary is not None
    assert [vocabulary.readable(i) for i in range(7)] == [
        "<unk>", "<s>", r"\n", "_the", "x_y", r"\xff", "<id 6>",
    ]  # fmt: skip
    assert vocabulary.special_ids == {1}
    assert Vocabulary.from_gguf({}) is None


def test_no_tokenizer_files(tmp_path: Path) -> None:
    assert Vocabulary.from_directory(tmp_path) is None


MALFORMED: dict[str, list[Any]] = {
    "tokenizer.json": [
        "", "{", "[]", "null", "{}", '{"model": 3}', '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {"a": -1}}}', '{"model": {"vocab": {"a": 99999999999}}}', '{"model": {"vocab": [[1, 2]]}}',
        '{"model": {"vocab": {"a": true}}}', '{"model": {"vocab": {}}, "added_tokens": 3}',
        '{"model": {"vocab": {}}, "added_tokens": [{"id": "x"}]}', '{"model": {"vocab": {}}, "added_tokens": [3]}',
        "[" * 100000, b"\xff\xfe\x00",
    ],
    "vocab.json": ["{", "[]", '{"a": [1]}', '{"a": 1.5}'],
    "vocab.txt": [b"\xff\xff"],
    "tokenizer.model": [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"hello world", b"\x08\x01"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, contents in MALFORMED.items() for c in contents])
def test_malformed_files_give_a_message(tmp_path: Path, name: str, content: str | bytes) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(HeadspanError):
        Vocabulary.from_directory(tmp_path)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_as_sentencepiece_model_give_tokens_or_a_message(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "tokenizer.model"
    path.write_bytes(content)
    try:
        vocabulary = Vocabulary.from_sentencepiece(path)
    except HeadspanError:
        return
    assert [vocabulary.readable(i) for i in range(vocabulary.size)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
STEP = JSON | st.fixed_dictionaries({"type": st.just("Sequence"), "pretokenizers": JSON, "decoders": JSON})


@given(
    model=JSON | st.fixed_dictionaries({"vocab": JSON, "type": JSON}),
    added=JSON | st.lists(st.fixed_dictionaries({"id": JSON, "content": JSON, "special": JSON}), max_size=2),
    steps=st.tuples(STEP, STEP),
)
@settings(max_examples=200, deadline=None)
def test_any_json_as_tokenizer_gives_tokens_or_a_message(
    tmp_path_factory: Any, model: Any, added: Any, steps: tuple[Any, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    content = {"model": model, "added_tokens": added, "pre_tokenizer": steps[0], "decoder": steps[1]}
    path.write_text(json.dumps(content))
    try:
        vocabulary = Vocabulary.from_tokenizer_json(path)
    except HeadspanError:
        return
    assert all(isinstance(vocabulary.readable(i), str) for i in range(min(vocabulary.size, 100)))


@given(tokens=JSON, types=JSON, model=JSON)
@settings(max_examples=100, deadline=None)
def test_any_gguf_metadata_gives_tokens_or_a_message(tokens: Any, types: Any, model: Any) -> None:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.model": model}
    try:
        vocabulary = Vocabulary.from_gguf(metadata)
    except HeadspanError:
        return
    assert vocabulary is None or all(isinstance(vocabulary.readable(i), str) for i in range(vocabulary.size))


def test_older_added_tokens_with_ids_beyond_reason(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    entries = {"9" * 5000: {"content": "x"}, "x": {"content": "y"}, "2": {"content": "[X]", "special": True}, "3": 4}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    vocabulary = Vocabulary.from_directory(tmp_path)
    assert vocabulary is not None
    assert [vocabulary.readable(i) for i in range(4)] == ["a", "b", "[X]", "<id 3>"]


@given(st.text(max_size=20))
def test_escaped_text_prints_on_one_line_and_without_spaces(text: str) -> None:
    shown = escape(text)
    assert shown.isprintable()
    assert " " not in shown


def test_a_broken_tokenizer_that_lists_its_tokens_reports_why_it_cannot_encode(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}))
    vocabulary = Vocabulary.from_tokenizer_json(path)
    assert vocabulary.readable(0) == "a"
    with pytest.raises(HeadspanError, match="encode"):
        vocabulary.encode("a")
