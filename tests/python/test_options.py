"""Compares the argument list of options.def with handwritten code: signatures, both bindings, torch's operators."""

import inspect
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import tandem
from tandem import _ctypes, _options
from tandem._binding import BACKWARD, CHECK

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Arguments of a call that a Python function has under another name.
PARTS = {
    "diagonal_offsets": "diagonal_offset",
    **dict.fromkeys(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), "block_mask"),
    **dict.fromkeys(("mask_block_q", "mask_block_k", "blocks_of_mask_mod"), "block_mask"),
}
DEFAULTS = {"Flag": False, "Real": 0.0, "Alignment": "bottom_right"}  # values by kind; all other kinds have None
NUMBERS = [n for n, kind in _options.KINDS.items() if kind in ("Length", "Scale", "Real", "Count")]
FLAGS = [n for n, kind in _options.KINDS.items() if kind == "Flag"]


def bindings():
    try:
        from tandem import _native
    except ImportError:
        return [_ctypes]
    return [_native, _ctypes]


def arrays():
    q = np.zeros((1, 2, 1, 8), np.float32)
    return {"q": q, "k": q, "v": q, "out": q, "lse": np.zeros((1, 1, 2), np.float32), "dout": q}


def names_of(kinds):
    """Returns the set of parameters of those arguments. OutputOnly arguments come from out_dtype."""
    return {PARTS.get(name, name) for name, kind in _options.KINDS.items() if kind in kinds}


# Context parallelism passes these to the binding. Other Python functions do not have them.
INTERNAL = {"sm_limit", "places"}
OPTION_KINDS = set(_options.KINDS.values()) - {"Tensor", "OutputOnly"}
INPUTS = {PARTS.get(name, name) for name in _options.INPUTS}


def check_parameters(function, expected):
    parameters = inspect.signature(function).parameters
    assert set(parameters) == expected
    for name, parameter in parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name in _options.KINDS:
            assert parameter.default == DEFAULTS.get(_options.KINDS[name]), name


def test_attention_takes_every_argument():
    forward = INPUTS | names_of(OPTION_KINDS) - {"accumulate"} - INTERNAL | set(_options.WRITTEN[0]) - {"lse"}
    check_parameters(tandem.attention, forward | {"return_lse", "out_dtype"})


def test_attention_backward_takes_every_argument():
    tensors, options = names_of({"Tensor"}) - {"max_scores"}, names_of(OPTION_KINDS) - {"num_splits"}
    check_parameters(tandem.attention_backward, (tensors | options) - INTERNAL | {"dscore_mod"})


@pytest.mark.skipif(not (ROOT / "scripts").is_dir(), reason="not in a checkout")
def test_the_generated_module_is_current():
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_options.py", "--check"], check=True)


def test_ctypes_has_every_member():
    assert [name for name, _ in _ctypes._Args._fields_] == ["size", *(name for name, _ in _options.MEMBERS)]


@pytest.mark.parametrize("binding", bindings())
@pytest.mark.parametrize("name", [*NUMBERS, *FLAGS, "alignment"])
def test_bindings_refuse_what_is_not_of_the_kind(binding, name):
    with pytest.raises(TypeError, match=rf"^{name} \((str|'x')\) must be "):
        binding.run(CHECK, {**arrays(), name: "x"})


@pytest.mark.parametrize("binding", bindings())
def test_bindings_refuse_other_names(binding):
    with pytest.raises(TypeError, match="a call has no 'softcaps'"):
        binding.run(CHECK, {**arrays(), "softcaps": 1.0})


def run(binding, what, call_args):
    """Returns None, or the code and the message of a failed call."""
    answer = binding.run(what, call_args)
    return answer if answer is None or answer[0] != "refused" else (answer[1], binding.last_error())


@pytest.mark.skipif(len(bindings()) < 2, reason="there is one binding")
@pytest.mark.parametrize("what", [CHECK, CHECK + BACKWARD])
@pytest.mark.parametrize("name", list(_options.KINDS))
def test_bindings_agree(name, what):
    """A value of each kind that the library refuses when it reads the member."""
    values = {"Tensor": np.zeros((3, 5), np.int64), "Length": -5, "Scale": np.inf, "Real": np.nan, "Count": -1}
    values |= {"Flag": True, "Alignment": "explicit", "Window": (-2, 1), "Seed": 7, "OutputOnly": True}
    values["Mod"] = ("what", ())
    call_args = {**arrays(), name: values[_options.KINDS[name]]}
    answers = [run(binding, what, call_args) for binding in bindings()]
    assert answers[0] == answers[1]
    if _options.KINDS[name] in ("Scale", "Real", "Count", "Mod") or name in _options.TENSORS:
        assert answers[0] is not None and name in answers[0][1]


def test_operators_have_every_argument():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tandem import _torch_ops  # noqa: F401

    arguments = torch.ops.tandem.forward.default._schema.arguments
    assert [x.name for x in arguments if not x.kwarg_only] == [*_options.INPUTS, "captured"]
    defaults = {x.name: x.default_value for x in arguments if x.kwarg_only}
    parameters = inspect.signature(tandem.attention).parameters
    assert {*_options.OPTIONS} - {"window"} <= set(defaults)
    for name in set(defaults) & set(parameters):
        assert defaults[name] == parameters[name].default, name


@pytest.mark.parametrize("options", [{"num_splits": 7}, {"deterministic": True}, {"batch_invariant": True}])
def test_options_that_change_no_result(options):
    """The CPU ignores these arguments, as tandem.h states."""
    q, k = (np.random.default_rng(1).standard_normal((2, n, 4, 16), np.float32) for n in (3, 700))
    assert np.array_equal(tandem.attention(q, k, k, **options), tandem.attention(q, k, k))


def test_page_tables():
    """Keys in pages give the bits of the same keys without pages."""
    random = np.random.default_rng(1)
    q, cache = random.standard_normal((2, 3, 4, 8), np.float32), random.standard_normal((6, 2, 5, 2, 8), np.float32)
    k, v = cache[:, 0], cache[:, 1]  # views of one cache
    table, used = np.array([[3, 0, 77], [4, 0, 5]], np.int32), np.array([9, 15], np.int32)
    out = tandem.attention(q, k, v, page_table=table, seqused_k=used, causal=True)
    dense = [x[np.where(table < 6, table, 0)].reshape(2, 15, 2, 8) for x in (k, v)]
    assert np.array_equal(out, tandem.attention(q, *dense, seqused_k=used, causal=True))
