"""A byte-level BPE encoder from GGUF metadata, for the known ways of splitting text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")

# Name in tokenizer.ggml.pre -> regular expressions that split the text one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), (_QWEN2,)),
}


def gguf_encoder(metadata: Mapping[str, Any], tokens: Mapping[int, str], added: set[int]) -> Callable[[], Any] | None:
    """A function that creates the tokenizer, or None if the file's pre-tokenizer is unknown."""
    splits = _SPLITS.get(str(metadata.get("tokenizer.ggml.pre")))
    merges = metadata.get("tokenizer.ggml.merges")
    if splits is None or not isinstance(merges, (list, tuple)):
        return None

    def make() -> Any:
        from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

        parts = (str(merge).partition(" ") for merge in merges)
        pairs = [(left, right) for left, _, right in parts]
        vocabulary = {token: i for i, token in tokens.items()}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
        steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(added & tokens.keys())])
        return tokenizer

    return make
