"""Expressions in the calls of an execution: names of positions mean the whole documents and all heads."""

from __future__ import annotations

import functools
import re

from torch import Tensor

from tandem import _score_mod

# The columns of the tensor of places, one row for each sequence of a call.
PLACES = ("document", "q_begin", "k_begin", "stride", "seqlen_q", "seqlen_k")

# Names of the language, and their values for queries and keys of a rank. $ is the prefix of new names.
_MEANINGS = {
    "batch": "$places[batch, 0]",
    "q": "$places[batch, 1] + q * $places[batch, 3]",
    "k": "$places[batch, 2] + k * $places[batch, 3]",
    "seqlen_q": "$places[batch, 4]",
    "seqlen_k": "$places[batch, 5]",
    "head": "head + $head",
}


@functools.lru_cache(maxsize=256)
def _placed_text(text: str) -> tuple[str, str, frozenset[str]]:
    """Returns the text for a rank, the prefix of its new names, and the names of the language that it reads."""
    code = re.sub(r"#[^\n]*", "", text)
    prefix = "at_"
    while prefix in code:
        prefix += "_"
    used = [name for name in _MEANINGS if re.search(rf"\b{name}\b", code)]
    for name in used:
        code = re.sub(rf"\b{name}\b", prefix + name, code)
    lines = [f"{prefix}{name} = {_MEANINGS[name].replace('$', prefix + 'own_')}; " for name in used]
    return "".join(lines) + code, prefix + "own_", frozenset(used)


def placed(mod: _score_mod.Bound, places: Tensor, first_head: int) -> _score_mod.Bound:
    """Returns the expression for calls with sequences at these places, whose heads begin at first_head."""
    text, prefix, used = _placed_text(mod[0])
    own: list[tuple[str, object, None]] = []
    if used - {"head"}:
        own.append((prefix + "places", places, None))
    if "head" in used:
        own.append((prefix + "head", first_head, None))
    return text, (*mod[1], *own)
