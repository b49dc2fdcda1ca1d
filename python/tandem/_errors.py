"""The errors of a call, each with the library's sentence: the argument, its value, the rule and the remedy."""

from __future__ import annotations

import re
from typing import Any


class Unsupported(RuntimeError):
    """A meaningful call that this device or version does not serve. Nothing has been written."""


def error_of(status: int, sentence: str, arrays: dict[str, Any]) -> Exception:
    """Returns the exception for a ``tandem_status`` that is not 0. arrays: the call's arrays by their names."""
    kind = {1: ValueError, 2: Unsupported}.get(status, RuntimeError)
    if without_memory := re.match(r"(\w+)\.data \(NULL\) must point", sentence):
        name = without_memory[1]
        return TypeError(f"{name} ({type(arrays.get(name)).__name__}) must have memory: pass a tensor with values")
    return kind(_in_python(sentence, arrays))


def _in_python(sentence: str, arrays: dict[str, Any]) -> str:
    """Returns a sentence of the C interface with Python's None and names of types."""

    def dtype(match: re.Match[str]) -> str:
        x = arrays.get(match[1])
        return f"{match[1]}.dtype ({str(x.dtype).rpartition('.')[2]})" if hasattr(x, "dtype") else match[0]

    sentence = re.sub(r"([\w.]+)\.dtype \(code \d+, \d+ bits\)", dtype, sentence)
    return sentence.replace("NULL", "None").replace("pass 0 for 1/sqrt(head_dim)", "pass None for 1/sqrt(head_dim)")


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """Returns the same error with another interface's names of the arguments. Sentences about an expression keep the
    expression's words.
    """
    if str(error).startswith(("score_mod: ", "mask_mod: ")):
        return error

    def name(match: re.Match[str]) -> str:
        article = "an " if match[1] and names[match[2]][0] in "aeiou" else match[1] or ""
        return article + names[match[2]]

    sentence = re.sub(r"(\ba )?\b(" + "|".join(names) + r")\b", name, str(error))
    return type(error)(re.sub(r"\b(\w+)(?:, \1)* and \1\b", r"\1", sentence))
