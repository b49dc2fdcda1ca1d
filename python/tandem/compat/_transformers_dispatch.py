"""Whether a model of transformers calls its attention interface, so that attn_implementation="tandem" reaches Tandem.

A model that does not would run its own attention on Tandem's masks. The answer comes from the code of its classes: it
holds for classes that this version of transformers does not know, such as those of a model's own repository.
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

import tandem

_MAX_CALLS = 3  # functions of functions that are looked into
_PRODUCTS = ("matmul", "bmm", "einsum")
_CHECK = "_tandem_dispatch_check"  # the attribute that holds a model's hook


def check_class(cls: type, implementation: str) -> None:
    """Raises Unsupported where no class in the module of a model's class calls the interface, and one has an attention
    of its own."""
    module = sys.modules.get(cls.__module__)
    classes = [x for x in vars(module).values() if _is_module_class(x)] if module is not None else []
    own = [x for x in classes if _has_own_attention(x)]
    if own and not any(map(_dispatches, classes)):
        _refuse(cls, own[0], implementation)


def check_model(model: torch.nn.Module, implementation: str) -> None:
    """Raises Unsupported where a module of a whole model reads a mask in an attention of its own."""
    classes = {type(m): None for m in model.modules() if _is_module_class(type(m))}
    own = [x for x in classes if _has_own_attention(x)]
    if not any(map(_dispatches, classes)):
        own_or_masked = own
    else:
        own_or_masked = [x for x in own if _takes_mask(x)]
    if own_or_masked:
        _refuse(type(model), own_or_masked[0], implementation)


def _refuse(cls: type, attention: type, implementation: str) -> None:
    raise tandem.Unsupported(
        f'attn_implementation ("{implementation}") must be another for {cls.__name__}: its {attention.__name__} does not '
        'call transformers\' attention interface; use attn_implementation="eager", or name it for the parts that do, as in '
        f'{{"": "eager", "text_config": "{implementation}"}}'
    )


def _is_module_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, torch.nn.Module) and not x.__module__.startswith("torch.")


@functools.lru_cache(maxsize=None)
def _dispatches(cls: type) -> bool:
    """Whether a method of the class gets a function from an AttentionInterface."""
    return any(_calls_interface(code, names) for code, names in _codes(cls))


def _calls_interface(code: types.CodeType, names: dict[str, Any]) -> bool:
    if "get_interface" in code.co_names:
        return True
    return any(isinstance(names.get(name), AttentionInterface) for name in code.co_names)


@functools.lru_cache(maxsize=None)
def _has_own_attention(cls: type) -> bool:
    """Whether the class computes a softmax of products, or calls torch's attention, and does not call the interface."""
    if _dispatches(cls):
        return False
    used = " ".join(name.lower() for code, _ in _codes(cls) for name in _names_in(code))
    return "scaled_dot_product_attention" in used or ("softmax" in used and any(name in used for name in _PRODUCTS))


@functools.lru_cache(maxsize=None)
def _takes_mask(cls: type) -> bool:
    try:
        parameters = inspect.signature(cls.forward).parameters
    except (TypeError, ValueError):
        return False
    return any("mask" in name for name in parameters)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names of globals, attributes and the operator @ that a code object uses."""
    yield from code.co_names
    if any(op.opname == "BINARY_MATRIX_MULTIPLY" or op.argrepr in ("@", "@=") for op in _instructions(code)):
        yield "matmul"


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> tuple[Any, ...]:
    import dis

    return tuple(dis.get_instructions(code))


def _codes(cls: type) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """The code of the class's own and inherited methods, and of the functions of their modules that these call."""
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


# ---- In the way of transformers' own checks --------------------------------------------------------------------------


def install(implementation: str) -> None:
    """Makes transformers refuse this implementation for models that do not call the interface: when a model begins to
    be made, when it is whole, and for models that never say that they are whole, at their first call."""
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
