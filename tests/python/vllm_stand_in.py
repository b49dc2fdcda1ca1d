"""The modules of vLLM that its attention backends import: vLLM's own files, or small classes in their place.

vLLM's files need only a few names of the rest of vLLM here, which install() provides.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_files
import torch


def install(monkeypatch) -> None:
    """Puts the modules into sys.modules, unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        return

    def add(name, **contents):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("", ".v1", ".v1.attention", ".v1.attention.backends", ".utils", ".distributed"):
        add("vllm" + name)
    for name in ("", ".layers", ".layers.quantization", ".layers.quantization.utils"):
        add("vllm.model_executor" + name)
    kinds = dict.fromkeys(("kFp8Dynamic64Sym", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kNvfp4Dynamic"))
    add("vllm.model_executor.layers.quantization.utils.quant_utils", **kinds)
    add("vllm.v1.kv_cache_interface", KVCacheLayout=str, get_kv_quant_mode=lambda dtype: None)
    add("vllm.config", get_current_vllm_config_or_none=lambda: None)
    add("vllm.distributed.parallel_state", get_dcp_world_size_and_rank=lambda x: (1, 0), get_pcp_group=_no_group)
    add("vllm.logger", init_logger=lambda name: SimpleNamespace(info=lambda *x: None))
    add("vllm.utils.import_utils", resolve_obj_by_qualname=None)
    for name in ("vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"):
        file = engine_files.find(name.replace(".", "/") + ".py")
        if file is None:
            add(name, **(_BACKEND if name.endswith("backend") else {**_REGISTRY, "AttentionBackendEnum": _new_enum()}))
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)


def common_metadata(step, slot_mapping, causal) -> Any:
    """Returns vLLM's CommonAttentionMetadata of a step. The batch has a padded request and padded tokens."""
    return sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata(
        query_start_loc=step.query_start_loc,
        query_start_loc_cpu=step.query_start_loc,
        seq_lens=step.seq_lens,
        num_reqs=len(step.seq_lens),
        num_actual_tokens=step.tokens,
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
        block_table_tensor=step.block_table,
        slot_mapping=slot_mapping,
        causal=causal,
    )


def _no_group():
    raise AssertionError("there is no process group")


# ---- Classes in place of vLLM's, with the defaults of its capability methods ---------------------------------


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionBackend:
    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size):
        return any(block_size % x.base == 0 for x in cls.get_supported_kernel_block_sizes())

    @classmethod
    def _is_not(cls):
        return False

    supports_mm_prefix = supports_rswa = supports_per_head_quant_scales = supports_alibi_sqrt = _is_not
    supports_pcp = supports_dcp = _is_not


class AttentionMetadataBuilder:
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device


class AttentionImpl:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


_BACKEND = {
    x.__name__: x
    for x in (
        AttentionType, MultipleOf, AttentionCGSupport, AttentionBackend, AttentionMetadataBuilder, AttentionImpl,
        CommonAttentionMetadata,
    )
}  # fmt: skip


def _new_enum():
    members: dict[str, Any] = {}
    return type("AttentionBackendEnum", (), {"__members__": members, "__class_getitem__": members.__getitem__})


def _register_backend(backend, class_path):
    members = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.__members__
    members[backend] = SimpleNamespace(get_path=lambda: class_path)


_REGISTRY = {"register_backend": _register_backend}
