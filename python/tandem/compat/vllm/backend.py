"""vLLM's attention backend TANDEM: the classes that a backend of vLLM 0.33 has. Importing this module needs vLLM.

The cache of a layer is (blocks, heads_k, block_size, 2 * head_size), keys before values, with any strides. Decodes,
prefill chunks and padded rows run in one call. The capability methods exclude 8-bit caches, context parallelism,
prefix-LM ranges and R-SWA.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import tandem
from tandem.compat.vllm.flash_attn_interface import flash_attn_varlen_func, reshape_and_cache_flash

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class TandemAttentionBackend(AttentionBackend):
    """The capabilities of Tandem, and the classes of the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # the forward reads keys and values from the cache only

    @staticmethod
    def get_name() -> str:
        return "TANDEM"

    @staticmethod
    def get_impl_cls() -> type[TandemAttentionImpl]:
        return TandemAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TandemMetadataBuilder]:
        return TandemMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 256 and head_size % 8 == 0

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major in (9, 10)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class TandemMetadata:
    """The batch of one step. The tensors are the runner's, so that CUDA graphs replay with their new contents."""

    num_actual_tokens: int  # tokens without padding
    max_query_len: int
    query_start_loc: torch.Tensor  # (requests + 1) int32
    max_seq_len: int
    seq_lens: torch.Tensor  # (requests) int32
    block_table: torch.Tensor  # (requests, max_blocks) int32
    slot_mapping: torch.Tensor  # (tokens) int64
    causal: Any = True  # bool, or (requests) int32


class TandemMetadataBuilder(AttentionMetadataBuilder):
    """Builds TandemMetadata from vLLM's CommonAttentionMetadata. There is no plan to compute."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TandemMetadata:
        common = common_attn_metadata
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name, None) is not None:
                raise tandem.Unsupported(f"{name} is not served by TANDEM: choose another attention backend")
        return TandemMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: TandemMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TandemMetadata:
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table, slot_mapping
        return updated

    def update_draft_decode_metadata(self, metadata: TandemMetadata) -> None:
        """Does nothing: the kernels read the lengths from the tensors of metadata."""


class TandemAttentionImpl(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in TandemAttentionBackend.supported_kv_cache_dtypes:
            raise tandem.Unsupported(f'kv_cache_dtype ("{kv_cache_dtype}") is not served by TANDEM: pass "auto"')
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window: list[int] | None = None
        if sliding_window is not None:
            self.window = [sliding_window - 1, sliding_window - 1 if attn_type in _ENCODERS else 0]
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the step's keys and values at slot_mapping. Tokens with a negative slot are skipped."""
        if self.attn_type in _ENCODERS:
            return
        key_cache, value_cache = self._caches(kv_cache)
        scales = getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None)
        reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, self.kv_cache_dtype, *scales)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TandemMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of query (tokens, heads, head_size) to output. Padded rows are not written.

        Without attn_metadata, which a profiling run omits, output becomes 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise tandem.Unsupported("output_scale is not served by TANDEM: disable the fusion of attention and quant")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        q, out = query[:tokens], output[:tokens].view(tokens, self.num_heads, self.head_size)
        options = {
            "out": out,
            "cu_seqlens_q": attn_metadata.query_start_loc,
            "max_seqlen_q": attn_metadata.max_query_len,
            "softmax_scale": self.scale,
            "alibi_slopes": self._slopes(query.device),
            "softcap": self.logits_soft_cap,
            "s_aux": self.sinks,
            "fa_version": 4,
        }
        if self.attn_type in _ENCODERS:
            lengths = {"cu_seqlens_k": attn_metadata.query_start_loc, "max_seqlen_k": attn_metadata.max_query_len}
            flash_attn_varlen_func(q, key[:tokens], value[:tokens], window_size=self.window, **lengths, **options)
            return output
        causal, window = attn_metadata.causal, self.window
        each = causal if isinstance(causal, torch.Tensor) else None
        if window is not None and causal is not True:  # a query of a sequence that is not causal sees both sides
            window = [window[0], window[0]]
        key_cache, value_cache = self._caches(kv_cache)
        flash_attn_varlen_func(
            q,
            key_cache,
            value_cache,
            causal=causal is True,
            dynamic_causal=each,
            window_size=window,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
            **options,
        )
        return output

    def _caches(self, kv_cache: torch.Tensor) -> Any:
        """Returns keys and values, (blocks, block_size, heads_k, head_size), as views of the fused cache."""
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _slopes(self, device: torch.device) -> torch.Tensor | None:
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.alibi_slopes
