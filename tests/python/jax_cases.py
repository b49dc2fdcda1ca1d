"""Calls of tandem.jax for its tests, and the same calls under torch."""

import os

# Read when jax opens its devices. Most time is compilations of code that runs once.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tandem
import tandem.jax

f32 = np.float32
attention = tandem.jax.attention
SINK, SLOPES = (np.array(x, f32) for x in ([0.3, -1, 2, 0], [0.5, 0.25, 0.1, 0]))
NAMES = {  # tandem.attention's names of the arguments of jax.nn
    "scale": "softmax_scale",
    "is_causal": "causal",
    "local_window_size": "window",
    "query_seq_lengths": "seqused_q",
    "key_value_seq_lengths": "seqused_k",
}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "no scale": {"scale": 0.0},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"local_window_size": (5, 2)},
    "window left": {"local_window_size": (4, None), "alignment": "bottom_right"},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": SINK},
    "alibi": {"alibi_slopes": SLOPES, "is_causal": True},
    "explicit": {"is_causal": True, "diagonal_offset": 4},
    "all": {"is_causal": True, "local_window_size": (9, None), "softcap": 2.0, "sink": SINK, "alibi_slopes": SLOPES},
}


def arrays(seed, *shapes, dtype=f32):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def qkv(seed=1, dtype=f32, batch=2, sq=11, sk=17, heads=4, heads_k=2):
    return arrays(seed, (batch, sq, heads, 16), (batch, sk, heads_k, 16), (batch, sk, heads_k, 24), dtype=dtype)


def in_tandem(options):
    """The same options for tandem.attention."""
    return {"alignment": "top_left", **{NAMES.get(name, name): x for name, x in options.items()}}


def with_gradients(function, inputs, cotangents):
    results, pull = jax.vjp(function, *inputs)
    return results, pull(cotangents)


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for n, (x, y) in enumerate(zip(ours, theirs)):
        np.testing.assert_array_equal(np.asarray(x, f32), np.asarray(y, f32), f"{n}")


def loss(q, k, v, bias=None, sink=None, **options):
    return (attention(q, k, v, bias, sink=sink, **options).astype(f32) ** 2).sum()


def close(ours, theirs, tolerance=2e-5):
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs):
        np.testing.assert_allclose(np.asarray(x, f32), np.asarray(y, f32), rtol=tolerance, atol=tolerance)


def in_torch(x):
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x
    tensor = torch.from_numpy(np.array(x, f32) if x.dtype == jnp.bfloat16 else np.array(x))
    return tensor.to(torch.bfloat16) if x.dtype == jnp.bfloat16 else tensor


def same_as_torch(q, k, v, options):
    """out, residual and all gradients have torch's bits."""
    named = {name: x for name, x in options.items() if name in ("bias", "sink")}
    mods = [options[name] for name in ("score_mod", "mask_mod") if isinstance(options.get(name), tandem.Mod)]
    captured = {name: x for mod in mods for name, x in mod.bindings.items() if getattr(x, "dtype", None) == f32}
    inputs = [*(q, k, v), *named.values(), *captured.values()]
    tensors = [in_torch(x).requires_grad_() for x in inputs]

    def options_of(values):
        found = {**options, **dict(zip(named, values[3:]))}
        places = dict(zip(captured, values[3 + len(named) :]))
        for name in ("score_mod", "mask_mod"):
            if isinstance(found.get(name), tandem.Mod):
                mod = found[name]
                found[name] = tandem.Mod(mod.text, **{n: places.get(n, x) for n, x in mod.bindings.items()})
        return found

    def function(*x):
        return attention(*x[:3], return_residual=True, **options_of(x))

    theirs = {name: in_torch(x) for name, x in in_tandem(options_of(tensors)).items()}
    for name in ("score_mod", "mask_mod"):
        if isinstance(mod := theirs.get(name), tandem.Mod):
            theirs[name] = tandem.Mod(mod.text, **{n: in_torch(x) for n, x in mod.bindings.items()})
    if blocks := theirs.get("block_mask"):
        theirs["block_mask"] = blocks._replace(**{n: in_torch(x) for n, x in blocks._asdict().items()})
    theirs["return_lse"] = True
    if "diagonal_offset" in theirs:
        del theirs["alignment"]
    out, lse = tandem.attention(*tensors[:3], **theirs)
    is_packed = "cu_seqlens_q" in options
    dout, dlse = arrays(9, out.shape, lse.mT.shape)
    dout = dout.astype(q.dtype)
    torch.autograd.backward((out, lse), (in_torch(dout), in_torch(dlse).mT))
    results, found = with_gradients(jax.jit(function), inputs, (dout, dlse))
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    same([*results, *found], [x.detach().float() for x in (out, lse.mT, *gradients)])
    assert is_packed or results[0].ndim == 4


SAME_LAYOUT = """
#include "xla/ffi/api/c_api.h"
#include "xla/ffi.h"
#define SAME(a, x, b, y) \\
  _Static_assert(offsetof(a, x) == offsetof(b, y) && sizeof(((a*)0)->x) == sizeof(((b*)0)->y), #a "." #x)
SAME(XlaExtension, type, XLA_FFI_Extension_Base, type);
SAME(XlaExtension, next, XLA_FFI_Extension_Base, next);
SAME(XlaVersion, minor, XLA_FFI_Api_Version, minor_version);
SAME(XlaMetadata, version, XLA_FFI_Metadata, api_version);
SAME(XlaMetadata, traits, XLA_FFI_Metadata, traits);
SAME(XlaMetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(XlaBuffer, type, XLA_FFI_Buffer, dtype);
SAME(XlaBuffer, data, XLA_FFI_Buffer, data);
SAME(XlaBuffer, dims, XLA_FFI_Buffer, dims);
SAME(XlaText, size, XLA_FFI_ByteSpan, len);
SAME(XlaScalar, value, XLA_FFI_Scalar, value);
SAME(XlaBuffers, buffers, XLA_FFI_Args, args);
SAME(XlaBuffers, buffers, XLA_FFI_Rets, rets);
SAME(XlaAttributes, kinds, XLA_FFI_Attrs, types);
SAME(XlaAttributes, names, XLA_FFI_Attrs, names);
SAME(XlaAttributes, values, XLA_FFI_Attrs, attrs);
SAME(XlaFrame, api, XLA_FFI_CallFrame, api);
SAME(XlaFrame, context, XLA_FFI_CallFrame, ctx);
SAME(XlaFrame, inputs, XLA_FFI_CallFrame, args);
SAME(XlaFrame, outputs, XLA_FFI_CallFrame, rets);
SAME(XlaFrame, attributes, XLA_FFI_CallFrame, attrs);
SAME(XlaNewError, message, XLA_FFI_Error_Create_Args, message);
SAME(XlaNewError, code, XLA_FFI_Error_Create_Args, errc);
SAME(XlaErrorMessage, message, XLA_FFI_Error_GetMessage_Args, message);
SAME(XlaOldError, error, XLA_FFI_Error_Destroy_Args, error);
SAME(XlaStream, stream, XLA_FFI_Stream_Get_Args, stream);
SAME(XlaAllocation, alignment, XLA_FFI_DeviceMemory_Allocate_Args, alignment);
SAME(XlaAllocation, data, XLA_FFI_DeviceMemory_Allocate_Args, data);
SAME(XlaRelease, data, XLA_FFI_DeviceMemory_Free_Args, data);
SAME(XlaOrdinal, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
SAME(XlaApi, version, XLA_FFI_Api, api_version);
SAME(XlaApi, new_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(XlaApi, error_message, XLA_FFI_Api, XLA_FFI_Error_GetMessage);
SAME(XlaApi, delete_error, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME(XlaApi, stream, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(XlaApi, allocate, XLA_FFI_Api, XLA_FFI_DeviceMemory_Allocate);
SAME(XlaApi, release, XLA_FFI_Api, XLA_FFI_DeviceMemory_Free);
SAME(XlaApi, ordinal, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
#define NUMBER(a, b) _Static_assert((int)(a) == (int)(b), #a)
NUMBER(kXlaMajor, XLA_FFI_API_MAJOR);
NUMBER(kXlaMetadata, XLA_FFI_Extension_Metadata);
NUMBER(kXlaScalarAttribute, XLA_FFI_AttrType_SCALAR);
NUMBER(kXlaTextAttribute, XLA_FFI_AttrType_STRING);
NUMBER(kXlaPred, XLA_FFI_DataType_PRED);
NUMBER(kXlaS64, XLA_FFI_DataType_S64);
NUMBER(kXlaU64, XLA_FFI_DataType_U64);
NUMBER(kXlaF64, XLA_FFI_DataType_F64);
NUMBER(kXlaBF16, XLA_FFI_DataType_BF16);
NUMBER(kXlaUnimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
"""
