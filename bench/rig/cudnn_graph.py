"""cuDNN's attention through its frontend (pip install nvidia-cudnn-frontend): windows, sinks and packed sequences,
which torch's interface to cuDNN does not have.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(None)
def _handle():
    import cudnn

    return cudnn.create_handle()


def forward(x):
    """Returns a call for a problem's inputs. Raises cuDNN's error if it does not serve them."""
    try:
        import cudnn
    except ImportError as why:
        raise RuntimeError("torch's cuDNN has no window, sink or packed form; nvidia-cudnn-frontend does") from why

    cell, handle = x.cell, _handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    kind = {"bf16": cudnn.data_type.BFLOAT16, "f16": cudnn.data_type.HALF}[cell.dtype]
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    given = {}  # graph tensor -> torch tensor

    def small(tensor, data_type):
        """Returns a tensor of one number for each sequence or head."""
        shape = [1, len(tensor), 1, 1] if data_type == cudnn.data_type.FLOAT else [len(tensor), 1, 1, 1]
        node = graph.tensor(dim=shape, stride=[shape[1], 1, 1, 1], data_type=data_type)
        given[node] = tensor
        return node

    def size(heads, dim):
        """Returns (batch, heads, seqlen, dim) and the strides of contiguous rows."""
        return [len(cell.sequences()), heads, cell.seqlen, dim], [cell.seqlen * heads * dim, dim, heads * dim, 1]

    def offsets(heads, dim):
        """Returns the beginnings of the sequences, in elements."""
        return small(x.cu_seqlens.long() * (heads * dim), cudnn.data_type.INT64)

    options = {}
    if cell.lengths:
        lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=x.q.device)
        options.update(use_padding_mask=True, seq_len_q=small(lengths, cudnn.data_type.INT32))
        options["seq_len_kv"] = small(lengths, cudnn.data_type.INT32)
    if cell.causal or cell.window:
        options.update(diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, diagonal_band_right_bound=0)
    if cell.window:
        options["diagonal_band_left_bound"] = cell.window
    if cell.sink:
        options["sink_token"] = small(x.sink.float(), cudnn.data_type.FLOAT)
    nodes = []
    for tensor, heads, dim in (
        (x.q, cell.heads, cell.head_dim),
        (x.k, cell.kv_heads, cell.head_dim),
        (x.v, cell.kv_heads, cell.dim_v),
    ):
        dims, strides = size(heads, dim)
        node = graph.tensor(dim=dims, stride=strides, data_type=kind)
        if cell.lengths:
            node.set_ragged_offset(offsets(heads, dim))
        given[node] = tensor
        nodes.append(node)
    result, _ = graph.sdpa(*nodes, generate_stats=False, attn_scale=x.scale, **options)
    dims, strides = size(cell.heads, cell.dim_v)
    result.set_output(True).set_dim(dims).set_stride(strides).set_data_type(kind)
    if cell.lengths:
        result.set_ragged_offset(offsets(cell.heads, cell.dim_v))
    out = torch.empty(*x.q.shape[:-1], cell.dim_v, dtype=x.q.dtype, device=x.q.device)
    given[result] = out
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=x.q.device)

    def call():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, workspace, handle=handle)
        return out

    return call
