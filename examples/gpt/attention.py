"""Causal attention of several libraries, under one name and with one call: flash_attn_func(q, k, v, causal=True).

q, k, v and the result are (batch, seqlen, heads, head_dim). A model selects a library by its import alone:

    from flash_attn_interface import flash_attn_func    # FlashAttention-3
    from tandem.fa3 import flash_attn_func              # Tandem
"""

import importlib.util

from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Name on the command line: name in the picture.
TITLES = {
    "tandem": "Tandem",
    "sdpa": "torch SDPA",
    "cudnn": "SDPA, cuDNN",
    "fa2": "SDPA, FlashAttention-2",
    "fa3": "FlashAttention-3",
}
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


def missing(name, device):
    """The reason why the library cannot run on "cpu" or "cuda", in one sentence; None if it can."""
    if name == "tandem" and importlib.util.find_spec("tandem") is None:
        return "tandem is not installed: pip install tandem-attention"
    if name == "fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return "fa3 is not installed: its package has flash_attn_interface, from the hopper folder of flash-attention"
    if name in ("cudnn", "fa2", "fa3") and device == "cpu":
        return f"{name} needs a GPU; on the CPU there are tandem and sdpa"
    return None


def load(name):
    """flash_attn_func of the library. Call missing() before."""
    if name == "tandem":
        from tandem.fa3 import flash_attn_func

        return flash_attn_func
    if name == "fa3":
        from flash_attn_interface import flash_attn_func as fa3

        def only_out(q, k, v, causal):
            out = fa3(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out  # older versions also return the log-sum-exp

        return only_out
    return _sdpa if name == "sdpa" else _sdpa_by(_BACKENDS[name])


def _sdpa(q, k, v, causal):
    """torch's choice of a backend. torch expects heads before the sequence: these are views, without copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _sdpa_by(backend):
    def attend(q, k, v, causal):
        with sdpa_kernel(backend):  # fails instead of choosing another backend
            return _sdpa(q, k, v, causal)

    return attend


def nothing(q, k, v, causal):
    """A view in place of attention: measures a step without attention."""
    return v
