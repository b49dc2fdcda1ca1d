"""cuDNN's attention through its frontend (pip install nvidia-cudnn-frontend). torch has no cuDNN windows,
sinks, packed sequences or bottom-right causal mask.
"""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(None)
def _cudnn():
    """Returns (the module, a handle)."""
    try:
        import cudnn
    except ImportError as why:
        raise RuntimeError(
            "cuDNN's frontend must be installed for this problem: pip install nvidia-cudnn-frontend"
        ) from why
    return cudnn, cudnn.create_handle()


class _Graph:
    """The graph of one pass over a problem's inputs."""

    def __init__(self, x):
        self.cudnn, self.handle = _cudnn()
        cudnn, self.x = self.cudnn, x
        self._set_stream()
        self.type = {"bf16": cudnn.data_type.BFLOAT16, "f16": cudnn.data_type.HALF}[x.cell.dtype]
        self.graph = cudnn.pygraph(
            io_data_type=self.type,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.tensors = {}  # graph tensor -> torch tensor

    def _set_stream(self) -> None:
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)

    def vector(self, tensor):
        """A tensor of one number for each sequence (integers) or head (float32)."""
        types = {torch.float32: "FLOAT", torch.int32: "INT32", torch.int64: "INT64"}
        shape = [1, len(tensor), 1, 1] if tensor.dtype == torch.float32 else [len(tensor), 1, 1, 1]
        data_type = getattr(self.cudnn.data_type, types[tensor.dtype])
        node = self.graph.tensor(dim=shape, stride=[shape[1], 1, 1, 1], data_type=data_type)
        self.tensors[node] = tensor
        return node

    def _layout(self, tensor):
        """Returns ((batch, heads, seqlen, dim), strides, offsets of packed sequences or None) of a tensor like q."""
        cell, (heads, dim) = self.x.cell, tensor.shape[-2:]
        rows = cell.seqlen if cell.lengths else tensor.shape[1]
        layout = [len(cell.sequences()), heads, rows, dim], [rows * heads * dim, dim, heads * dim, 1]
        offsets = self.vector(self.x.cu_seqlens.long() * (heads * dim)) if cell.lengths else None
        return *layout, offsets

    def input(self, tensor):
        dims, strides, offsets = self._layout(tensor)
        node = self.graph.tensor(dim=dims, stride=strides, data_type=self.type)
        if offsets is not None:
            node.set_ragged_offset(offsets)
        self.tensors[node] = tensor
        return node

    def output(self, node, like, heads: int, dim: int):
        """Makes a node an output, in a new tensor with the rows of `like`."""
        tensor = torch.empty(*like.shape[:-2], heads, dim, dtype=like.dtype, device=like.device)
        dims, strides, offsets = self._layout(tensor)
        node.set_output(True).set_dim(dims).set_stride(strides).set_data_type(self.type)
        if offsets is not None:
            node.set_ragged_offset(offsets)
        self.tensors[node] = tensor
        return tensor

    def statistics(self, lse):
        """LSE as an input, from (batch, heads, seqlen) or packed (heads, total)."""
        cell, cudnn = self.x.cell, self.cudnn
        dims = [len(cell.sequences()), cell.heads, cell.seqlen, 1]
        tensor, strides = lse, [cell.heads * cell.seqlen, cell.seqlen, 1, 1]
        if cell.lengths:
            tensor, strides = lse.t().contiguous(), [cell.seqlen * cell.heads, 1, cell.heads, 1]
        node = self.graph.tensor(dim=dims, stride=strides, data_type=cudnn.data_type.FLOAT)
        if cell.lengths:
            node.set_ragged_offset(self.vector(self.x.cu_seqlens.long() * cell.heads))
        self.tensors[node] = tensor
        return node

    def options(self) -> dict:
        cell, cudnn, options = self.x.cell, self.cudnn, dict(attn_scale=self.x.scale)
        if cell.lengths:
            lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=self.x.q.device)
            options.update(use_padding_mask=True, seq_len_q=self.vector(lengths), seq_len_kv=self.vector(lengths))
        if cell.causal or cell.window:
            unequal = cell.keys != cell.seqlen
            alignment = cudnn.diagonal_alignment.BOTTOM_RIGHT if unequal else cudnn.diagonal_alignment.TOP_LEFT
            options.update(diagonal_alignment=alignment, diagonal_band_right_bound=0)
        if cell.window:
            options["diagonal_band_left_bound"] = cell.window
        if cell.sink:
            options["sink_token"] = self.vector(self.x.sink.float())
        return options

    def build(self, result):
        """A call that executes the graph and returns `result`. Raises cuDNN's error if cuDNN does not serve the
        graph."""
        graph = self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=self.x.q.device)

        def call():
            self._set_stream()
            graph.execute(self.tensors, workspace, handle=self.handle)
            return result

        return call


def forward(x):
    """A call for a problem's inputs that returns the output."""
    of = _Graph(x)
    result, _ = of.graph.sdpa(*(of.input(t) for t in (x.q, x.k, x.v)), generate_stats=False, **of.options())
    return of.build(of.output(result, x.q, x.cell.heads, x.cell.dim_v))


def backward(x, deterministic: bool = False):
    """A call for a problem's inputs, out, LSE and dout that returns dq, dk and dv."""
    of, cell = _Graph(x), x.cell
    inputs = [of.input(t) for t in (x.q, x.k, x.v, x.out, x.dout)]
    options = dict(of.options(), use_deterministic_algorithm=deterministic)
    if cell.lengths:
        options.update(max_total_seq_len_q=len(x.q), max_total_seq_len_kv=len(x.k))
    nodes = of.graph.sdpa_backward(*inputs, of.statistics(x.lse), **options)
    return of.build([of.output(node, t, *t.shape[-2:]) for node, t in zip(nodes, (x.q, x.k, x.v))])
