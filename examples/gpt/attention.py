"""Causal attention of one library or another, under one name and with one call: flash_attn_func(q, k, v, causal=True).

q, k and v are (batch, seqlen, heads, head_dim), and so is what comes back. A model changes hands by its import alone:

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
    """Why the library cannot serve on "cpu" or "cuda", in one sentence; None where it can."""
    if name == "tandem" and importlib.util.find_spec("tandem") is None:
        return "tandem is not installed: pip install tandem-attention"
    if name == "fa3" and importlib.util.find_spec("flash_attn_interface") is None:
        return "fa3 is not installed: its package has flash_attn_interface, from the hopper folder of flash-attention"
    if name in ("cudnn", "fa2", "fa3") and device == "cpu":
        return f"{name} needs a GPU; on the CPU there are tandem and sdpa"
    return None


def load(name):
    """flash_attn_func of the library, which missing() has nothing against."""
    if name == "tandem":
        from tandem.fa3 import flash_attn_func

        return flash_attn_func
    if name == "fa3":
        from flash_attn_interface import flash_attn_func as fa3

        def only_out(q, k, v, causal):
            out = fa3(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out  # older ones return the log-sum-exp, too

        return only_out
    return _sdpa if name == "sdpa" else _sdpa_by(_BACKENDS[name])


def _sdpa(q, k, v, causal):
    """torch's own choice of a backend. It wants the heads before the sequence: views, nothing is copied."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _sdpa_by(backend):
    def attend(q, k, v, causal):
        with sdpa_kernel(backend):  # fails rather than take another
            return _sdpa(q, k, v, causal)

    return attend


def nothing(q, k, v, causal):
    """A view in the place of attention: what a step costs without it."""
    return v
