"""Phrases that must not return to the docs, the sources and the scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GENERATED = ("docs/architecture.md", "docs/cli.md")  # made of docstrings and help texts, which are checked themselves

# Pattern, what to write instead, an example. A blank also matches the break between two lines of a paragraph, of a
# comment, or of adjacent strings.
PHRASES = [
    (r"said twice", "repeated twice", "random tokens said twice"),
    (r"(?:is|are|was|were|be|been) told(?! apart)", "is reported, is refused", "a file that changed is told"),
    (r"(?:in|with|by) (?:a|one) sentence", "with a message", "refused with a sentence"),
    (r"a sentence (?:says|of ours|that|where)", "a message, a note", "a sentence says which"),
    (r"(?:stands?|stood|standing) (?:in front of|behind|before|after|beside|between|at|in|on|under|where|once)",
     "comes before, comes after, is", "the norm stands in front of attention"),
    (r"in front of", "before", "the norm in front of attention"),
    (r"(?:norms?|everything|all|gains?) behind", "after", "the norm behind attention"),
    (r"writes?(?: \w+)? exchanged", "patch the output of a head", "when one head's write is exchanged"),
    (r"(?:exchanged (?:in|for)|exchang(?:es?|ing) (?:what|only))", "patch", "exchanging what one head writes"),
    (r"(?:numbers?|entry|entries|page|row|set|one) an? (?:token|head|layer|pair|family|result|step|line|weight)",
     "one … per …", "multiplied by one number a token"),
    (r"strangers?", "untrusted", "files of strangers"),
    (r"mend(?:s|ed|ing)?", "fix", "found and mended"),
    (r"pictures (?:and|or) sound", "vision and audio", "models of pictures and sound"),
    (r"reads? pictures", "vision", "layers that read pictures"),
    (r"wonders", "(say it plainly)", "p alone finds thousands of wonders"),
    (r"hangs? on", "depends on", "two areas hang on near ties"),
    (r"as it tells you", "(say it plainly)", "near ties, as it tells you"),
    (r"be rid of", "remove", "how to be rid of them"),
    (r"used edges?", "edge with a large effect", "used edges only"),
    (r"how improbable", "probability allowed for", "how improbable a wrong certificate must be"),
    (r"makes? expect", "expected from", "what the PKs of the hops alone make expect"),
    (r"(?:(?!there )\w+|[^\w\s]) (?:is|are|was|were) no (?!longer|more|less|such|one\b)\w+",
     "is not a", "{text!r} is no result"),
    (r"nobody (?:asked|asks)", "not requested yet", "and nobody asked for them yet"),
    (r"nobody's business", "private", "the folders of a machine are nobody's business"),
    (r"for whoever", "for", "a note for whoever asks"),
    (r"laid beside", "compared with", "computed again and laid beside the published ones"),
    (r"and (?:their )?kin", "and related models", "DeepSeek-V3 and kin"),
    (r"(?:name|sentence|word|kind)s? of ours", "headspan's own", "under a name of ours"),
    (r"by lot", "at random", "choosing by lot"),
    (r"dealt to", "assigned to", "labels dealt to the heads at random"),
    (r"turned at random", "rotated at random", "if every link were turned at random"),
    (r"one (?:below|beside) the other", "stacked, concatenated", "the weights one below the other"),
    (r"(?:made|drawn|stored|starts?) anew", "again", "the run starts anew"),
    (r"(?:goes|go|went) on", "continues", "an interrupted run goes on"),
    (r"in sight", "visible", "the names of the columns stay in sight"),
    (r"errs? towards", "is conservative", "the null errs towards caution"),
    (r"without being wired", "without being connected", "they score more without being wired"),
    (r"pages? of change", "change page", "the pages of change"),
    (r"(?:within|stated) room", "within tolerance", "agree within room"),
    (r"is said", "is reported, is noted", "and that is said"),
    (r"so that none", "(say it plainly)", "so that none is lost"),
    (r"of whom", "(say it plainly)", "heads, two of whom write"),
    (r"(?:is|are) gone through", "is read", "it is gone through once"),
    (r"ask(?:s|ed)? for nothing", "makes no requests", "the page asks for nothing"),
    (r"(?:unless|when|until) told", "by default, on request", "float32 unless told"),
]  # fmt: skip

_BREAK = r"""(?:[ \t]*["'`]?[ \t]*\n[ \t]*(?:(?:[fr]?["'`]|\#+|//+|\*|>)[ \t]*)?|[ \t]+)"""
COMPILED = [
    (re.compile(rf"(?:(?<!\w)|(?!\w)){pattern.replace(' ', _BREAK)}(?!\w)", re.IGNORECASE), instead)
    for pattern, instead, _ in PHRASES
]


# Without word boundaries, for text on one line in lower case: ten times as fast, so it comes first.
LOOSE = [re.compile(pattern) for pattern, *_ in PHRASES]


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and replacement of every banned phrase in a text."""
    flat = re.sub(_BREAK, " ", text).lower()
    for (pattern, instead), loose in zip(COMPILED, LOOSE, strict=True):
        for match in pattern.finditer(text) if loose.search(flat) else ():
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def written() -> list[str]:
    """The files that are checked, as paths from the root."""
    sources = [path for ending in ("py", "js", "html", "css", "md") for path in (ROOT / "src").rglob(f"*.{ending}")]
    scripts = [path for home in ("benchmarks", "docs", "examples", "tests") for path in (ROOT / home).rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
    found = (*pages, *(ROOT / "docs").glob("*.md"), *sources, *scripts)
    return sorted({str(path.relative_to(ROOT)) for path in found} - {*GENERATED, "tests/test_language.py"})


def hits(name: str) -> list[str]:
    found = sorted(found_in((ROOT / name).read_text(encoding="utf-8")))
    return [f"{name}:{line}: {phrase!r}, write: {instead}" for line, phrase, instead in found]


def test_rewritten_pages_stay_plain() -> None:
    found = [hit for name in written() for hit in hits(name)]
    assert not found, "\n".join(found)


def too_wide(page: str) -> list[int]:
    """Lines over 100 columns outside of code blocks, tables, pictures and links, which cannot be wrapped."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    lines = enumerate(text.splitlines(), 1)
    return [i for i, line in lines if len(line) > 100 and " " in line and not re.match(r"\||!?\[[^]]*\]\(\S+$", line)]


def test_docs_wrap_at_100_columns() -> None:
    pages = [n for n in written() if re.fullmatch(r"docs/[^/]+\.md", n)]
    assert len(pages) >= 9
    wide = {name: too_wide((ROOT / name).read_text(encoding="utf-8")) for name in pages}
    assert not {name: lines for name, lines in wide.items() if lines}


@pytest.mark.parametrize(("pattern", "example"), [(pattern, example) for pattern, _, example in PHRASES])
def test_a_phrase_is_found_in_its_example(pattern: str, example: str) -> None:
    """Within a line and across lines of a paragraph, a comment and adjacent strings."""
    compiled = COMPILED[[phrase for phrase, *_ in PHRASES].index(pattern)][0]
    for gap in (" ", "\n", "\n    # ", ' "\n    "', ' "\n    f"', "\n// "):
        text = example.replace(" ", gap)
        assert compiled.search(text) and list(found_in(text)), gap


@pytest.mark.parametrize("text", [
    "there is no such file", "There\nare no edges", "it is no longer read", "the two are told apart", "it depends on",
    "exchangeable scores", "what the name stands for", "the function behind each formula", "a recommended value",
    "which token a head attends to", "f(x, exchanged, for_all)", "a number of tokens",
])  # fmt: skip
def test_plain_english_is_left_alone(text: str) -> None:
    assert not list(found_in(text))
