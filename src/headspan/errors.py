"""The one kind of exception that users are meant to read."""


class HeadspanError(Exception):
    """Bad input or an impossible request, told in one plain sentence.

    The sentence says what was wrong, what was seen (shape, key, file) and what to do.
    The command line prints it and exits with code 2; it never shows a traceback for it.

    >>> str(HeadspanError("no tensor named 'a\\nb'"))
    "no tensor named 'a\\\\nb'"
    """

    def __init__(self, sentence: str) -> None:
        # Names of files and tensors come from strangers: a line break in one must not make two lines of this.
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence))


def missing_extra(package: str, extra: str, what: str) -> HeadspanError:
    """The error for an optional dependency that is not installed.

    >>> str(missing_extra("gguf", "gguf", "reading GGUF files"))
    "reading GGUF files needs the package gguf, which is not installed: run pip install 'headspan[gguf]'"
    """
    return HeadspanError(
        f"{what} needs the package {package}, which is not installed: run pip install 'headspan[{extra}]'"
    )
