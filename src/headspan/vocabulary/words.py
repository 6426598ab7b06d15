"""Lists, counts and names of head classes in plain words."""

from __future__ import annotations

from collections.abc import Iterable

# Classes that need the word "head" after them; the others are names of heads already.
_KINDS = {"identity", "previous-token", "duplicate-token", "induction", "s-inhibition"}


def listed(names: Iterable[object]) -> str:
    """Names joined by commas and "and".

    >>> listed("QKV"), listed(["OK"]), listed([])
    ('Q, K and V', 'OK', '')
    """
    *first, last = [str(name) for name in names] or [""]
    return " and ".join(filter(None, (", ".join(first), last)))


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number of things.

    >>> counted(1, "edge"), counted(1200, "edge"), counted(0, "entry", "entries")
    ('1 edge', '1,200 edges', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def class_words(label: str) -> str:
    """A class of heads in words.

    >>> class_words("previous_token"), class_words("backup_name_mover"), class_words("S-inhibition")
    ('previous-token head', 'backup name mover', 'S-inhibition head')
    """
    words = " ".join(label.replace("_", " ").split())
    joined = words.replace(" ", "-")
    if joined.lower() not in _KINDS:
        return words
    return f"{'S' + joined[1:] if joined.startswith('s-') else joined} head"
