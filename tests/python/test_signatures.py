"""The signatures that the drop-in modules replace: names, order and defaults."""

import inspect

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import tandem.fa3  # noqa: E402
import tandem.fa4  # noqa: E402
import tandem.flash_attn  # noqa: E402
import tandem.sdpa  # noqa: E402
import tandem.transformer_engine  # noqa: E402
from tandem.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from tandem.flash_attn.layers import rotary  # noqa: E402

FA2_TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
FA2 = {
    "flash_attn_func": f"(q, k, v, {FA2_TAIL})",
    "flash_attn_qkvpacked_func": f"(qkv, {FA2_TAIL})",
    "flash_attn_kvpacked_func": f"(q, kv, {FA2_TAIL})",
    "flash_attn_varlen_func": (
        f"(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {FA2_TAIL}, block_table=None)"
    ),
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {FA2_TAIL})",
    "flash_attn_varlen_kvpacked_func": (f"(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {FA2_TAIL})"),
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False)"
    ),
}
FA3_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
FA3_TAIL = (
    f"softmax_scale=None, causal=False, qv=None, {FA3_DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
FA3 = {
    "flash_attn_func": f"(q, k, v, {FA3_TAIL})",
    "flash_attn_qkvpacked_func": (
        f"(qkv, softmax_scale=None, causal=False, {FA3_DESCALES}, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)"
    ),
    "flash_attn_varlen_func": (
        f"(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, {FA3_TAIL})"
    ),
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {FA3_DESCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)"
    ),
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None)",
    "get_scheduler_metadata": (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)"
    ),
}
FA4_MIDDLE = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
FA4 = {
    "flash_attn_func": (
        f"(q, k, v, qv=None, gather_kv_indices=None, {FA4_MIDDLE}, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, "
        "gather_bwd_token_chunk=None)"
    ),
    "flash_attn_varlen_func": (
        "(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        f"{FA4_MIDDLE}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None)"
    ),
    "flash_attn_combine": (
        "(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, "
        "return_lse=True)"
    ),
    "get_scheduler_metadata": (
        "(max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, "
        "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
        "seqlen_k_per_split=None, _arch=None)"
    ),
}
PADDING = {
    "unpad_input": "(hidden_states, attention_mask, unused_mask=None)",
    "unpad_input_for_concatenated_sequences": "(hidden_states, attention_mask_in_length)",
    "pad_input": "(hidden_states, indices, batch, seqlen)",
}
ROTARY = {
    "rotate_half": "(x, interleaved=False)",
    "apply_rotary_emb_torch": "(x, cos, sin, interleaved=False)",
    "apply_rotary_emb": (
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)"
    ),
    "apply_rotary_emb_func": (
        "(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None)"
    ),
    "apply_rotary_emb_qkv_": (
        "(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None)"
    ),
    "apply_rotary_emb_kv_": "(kv, cos, sin, interleaved=False, seqlen_offsets=0)",
    "RotaryEmbedding": "(dim, base=10000.0, interleaved=False, scale_base=None, device=None)",
}
SDPA = {
    "scaled_dot_product_attention": (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False)"
    )
}
# TransformerEngine 2.20.2, whose load_balancing_strategy is DUAL_CHUNK_SWAP by default.
TRANSFORMER_ENGINE = {
    "attn_forward_func_with_cp": (
        "(is_training, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded, "
        "cu_seqlens_kv_padded, dropout_p, cp_group, cp_global_ranks, cp_stream, cp_comm_type, softmax_scale=None, "
        "qkv_format='bshd', attn_mask_type='causal', attn_bias_type='no_bias', attn_bias=None, deterministic=False,"
        " use_fused_attention=False, window_size=None, softcap=0.0, fp8=False, fp8_meta=None, quantizers=None, "
        "pad_between_seqs=False, use_flash_attn_3=False, use_flash_attn_4=False, softmax_type='vanilla', "
        "softmax_offset=None, fp8_output=False, layer_number=1, return_max_logit=False, "
        "load_balancing_strategy=None)"
    )
}
MODULES = (
    (tandem.flash_attn, FA2),
    (flash_attn_interface, FA2),
    (tandem.fa3, FA3),
    (tandem.fa4, FA4),
    (bert_padding, PADDING),
    (rotary, ROTARY),
    (tandem.sdpa, SDPA),
    (tandem.transformer_engine, TRANSFORMER_ENGINE),
)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [(module, name, text) for module, texts in MODULES for name, text in texts.items()],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_signature(module, name, expected):
    assert str(inspect.signature(getattr(module, name))) == expected


def test_the_module_sdpa_has_the_signature_of_its_function():
    assert str(inspect.signature(tandem.sdpa)) == SDPA["scaled_dot_product_attention"]


def test_everything_of_the_interface_is_exported():
    assert set(tandem.flash_attn.__all__) == set(FA2)


def test_forward_of_the_rotary_module():
    expected = "(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)"
    assert str(inspect.signature(rotary.RotaryEmbedding.forward)) == expected


@pytest.mark.parametrize("module", [tandem.flash_attn, tandem.fa3, tandem.fa4])
def test_public_functions_say_what_they_take_and_return(module):
    for name, function in vars(module).items():
        if inspect.isfunction(function) and not name.startswith("_") and function.__module__.startswith("tandem"):
            assert function.__doc__, name
