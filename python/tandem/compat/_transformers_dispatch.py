"""The check that a model of transformers calls its attention interface, so that attn_implementation="tandem" reaches
Tandem.

A model that does not call it would use Tandem's masks in its own attention. The check reads the code of the model's
classes. The check therefore also serves classes that transformers does not know, such as a model repository's classes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging

import tandem

logger = logging.get_logger(__name__)

_MAX_CALLS = 3  # depth of calls that the check follows
_PRODUCTS = ("matmul", "bmm", "einsum")
_CHECK = "_tandem_dispatch_check"  # the attribute that holds a model's hook


def check_class(cls: type, implementation: str) -> None:
    """Raises Unsupported if the module of a model's class reads masks but never calls the attention interface."""
    module = sys.modules.get(cls.__module__)
    classes = [x for x in vars(module).values() if _is_module_class(x)] if module is not None else []
    if not any(map(_dispatches, classes)):
        _refuse_masked(cls, classes, implementation)


def check_model(model: torch.nn.Module, implementation: str) -> None:
    """Raises Unsupported if a module of a complete model applies a mask in a private attention. Warns if no module
    calls the interface and the model's private attentions have no mask.
    """
    classes = list({type(m): None for m in model.modules() if _is_module_class(type(m))})
    if any(map(_dispatches, classes)):
        for x in classes:
            is_part = _has_own_attention(x) and not issubclass(x, PreTrainedModel)
            if is_part and _takes_mask(x, exact=True) and not _reads_booleans(x):
                _refuse(type(model), x, implementation)
        return
    _refuse_masked(type(model), classes, implementation)
    own = [x for x in classes if _has_own_attention(x)]
    if own:
        logger.warning_once(
            f'`attn_implementation="{implementation}"` changes nothing in {type(model).__name__}: its '
            f"{own[0].__name__} does not call transformers' attention interface."
        )


def _refuse_masked(cls: type, classes: list[type], implementation: str) -> None:
    for x in classes:
        is_attention = _has_own_attention(x) or "attention" in x.__name__.lower() or "attn" in x.__name__.lower()
        if is_attention and _takes_mask(x, exact=False):
            _refuse(cls, x, implementation)


def _refuse(cls: type, attention: type, implementation: str) -> None:
    raise tandem.Unsupported(
        f'attn_implementation ("{implementation}") must be another for {cls.__name__}, because its '
        f'{attention.__name__} does not call transformers\' attention interface: pass "eager", or a dict such as '
        f'{{"": "eager", "text_config": "{implementation}"}}'
    )


def _is_module_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, torch.nn.Module) and not x.__module__.startswith("torch.")


@functools.cache
def _dispatches(cls: type) -> bool:
    """Returns True if a method of the class gets a function from an AttentionInterface."""
    return any(_calls_interface(code, names) for code, names in _codes(cls))


def _calls_interface(code: types.CodeType, names: dict[str, Any]) -> bool:
    if "get_interface" in code.co_names:
        return True
    return any(isinstance(names.get(name), AttentionInterface) for name in code.co_names)


@functools.cache
def _has_own_attention(cls: type) -> bool:
    """Returns True if the class computes attention (a softmax of products, or torch's) without the interface."""
    if _dispatches(cls):
        return False
    used = " ".join(name.lower() for code, _ in _codes(cls) for name in _names_in(code))
    calls_torch = "scaled_dot_product_attention" in used or "multi_head_attention_forward" in used
    return calls_torch or ("softmax" in used and any(name in used for name in _PRODUCTS))


def _takes_mask(cls: type, exact: bool) -> bool:
    """Returns True if the class's forward has a mask. exact: only under transformers' names of a whole model's mask."""
    try:
        names = inspect.signature(cls.forward).parameters
    except (TypeError, ValueError):
        return False
    whole = ("attention_mask", "attn_mask", "causal_mask", "mask")
    return any(name in whole if exact else name.endswith("mask") for name in names)


def _reads_booleans(cls: type) -> bool:
    """Returns True if the class's code distinguishes boolean masks from additive ones."""
    names = {name for code, _ in _codes(cls) for name in code.co_names}
    return "logical_not" in names or "logical_and" in names or {"dtype", "bool"} <= names


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Returns the names of globals, attributes and the operator @ that a code object uses."""
    yield from code.co_names
    if any(op.opname == "BINARY_MATRIX_MULTIPLY" or op.argrepr in ("@", "@=") for op in _instructions(code)):
        yield "matmul"


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> tuple[Any, ...]:
    import dis

    return tuple(dis.get_instructions(code))


def _codes(cls: type) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Returns the code of the class's methods, also of inherited methods, and of functions that a method calls in its
    module.
    """
    seen: set[types.CodeType] = set()
    for base in cls.__mro__:
        if base is PreTrainedModel or not _is_module_class(base):
            continue
        for x in vars(base).values():
            yield from _codes_of(inspect.unwrap(x) if callable(x) else x, seen, _MAX_CALLS)


def _codes_of(x: Any, seen: set[types.CodeType], depth: int) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    x = getattr(x, "fget", None) or getattr(x, "__func__", x)
    if not isinstance(x, types.FunctionType):
        return
    names = x.__globals__
    todo = [x.__code__]
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code, names
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names if depth else ():
            called = names.get(name)
            if isinstance(called, types.FunctionType) and called.__module__ == x.__module__:
                yield from _codes_of(called, seen, depth - 1)


# ---- Hooks into transformers' checks ---------------------------------------------------------------------------------


def install(implementation: str) -> None:
    """Makes transformers refuse this implementation for models that do not call the interface.

    The check runs when a model's construction begins, when it is complete (post_init), and at the first call of a model
    that never calls post_init.
    """
    if getattr(PreTrainedModel.get_correct_attn_implementation, "_checks_dispatch", False):
        return
    correct, post_init = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init

    @functools.wraps(correct)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, is_init_check: bool = False) -> Any:
        result = correct(self, requested_attention, is_init_check)
        if result == implementation:
            check_class(type(self), implementation)
            if is_init_check:
                setattr(self, _CHECK, self.register_forward_pre_hook(_check_first_call))
            else:
                check_model(self, implementation)
        return result

    @functools.wraps(post_init)
    def checked_post_init(self: Any) -> Any:
        result = post_init(self)
        if self.config._attn_implementation == implementation:
            _finish(self)
            check_model(self, implementation)
        return result

    get_correct_attn_implementation._checks_dispatch = True
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.post_init = checked_post_init


def _finish(model: Any) -> None:
    hook = model.__dict__.pop(_CHECK, None)
    if hook is not None:
        hook.remove()


def _check_first_call(model: Any, _: Any) -> None:
    _finish(model)
    check_model(model, model.config._attn_implementation)


def serve_continuous_batching(implementation: str) -> None:
    """Makes transformers' continuous batching keep this implementation, which transformers does not know.

    Versions without that check are left as they are: their attention functions receive the paged cache, which
    tandem_attention refuses.
    """
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    except ImportError:
        return
    switch = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if switch is None or getattr(switch, "_keeps_implementation", False):
        return

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        if model.config._attn_implementation != implementation:
            switch(self, model, *arguments, **options)

    switch_to_cb_friendly_attn._keeps_implementation = True
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
