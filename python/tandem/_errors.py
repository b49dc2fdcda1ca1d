"""The errors of a call, each with the library's own sentence: the argument, its value, the rule and the way out."""

from __future__ import annotations


class Unsupported(RuntimeError):
    """A meaningful call that this device or version does not serve. Nothing has been written."""


def error_of(status: int, sentence: str) -> Exception:
    """The exception for a ``tandem_status`` that is not 0."""
    if status == 1:
        return ValueError(sentence)
    if status == 2:
        return Unsupported(sentence)
    return RuntimeError(sentence)
