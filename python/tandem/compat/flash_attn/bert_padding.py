"""Converts between padded batches and packed sequences, under the names of flash_attn.bert_padding, in torch
operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class IndexFirstAxis(torch.autograd.Function):
    """input[indices]."""

    @staticmethod
    def forward(ctx, input, indices):
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx, dout):
        (indices,) = ctx.saved_tensors
        return dout.new_zeros(ctx.first_axis_dim, *dout.shape[1:]).index_add_(0, indices, dout), None


class IndexPutFirstAxis(torch.autograd.Function):
    """Returns zeros of first_axis_dim rows, with values at the rows indices."""

    @staticmethod
    def forward(ctx, values, indices, first_axis_dim):
        ctx.save_for_backward(indices)
        return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy_(0, indices, values)

    @staticmethod
    def backward(ctx, dout):
        (indices,) = ctx.saved_tensors
        return dout.index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """Returns (input[indices], input). The gradients of both are joined without an intermediate tensor."""

    @staticmethod
    def forward(ctx, input, indices):
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx, dout, dresidual):
        (indices,) = ctx.saved_tensors
        return dresidual.index_add(0, indices, dout), None


index_first_axis = IndexFirstAxis.apply
index_put_first_axis = IndexPutFirstAxis.apply
index_first_axis_residual = IndexFirstAxisResidual.apply


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Returns the rows of hidden_states (batch, seqlen, ...) for which attention_mask (batch, seqlen; 1 or True: a
    token) is set.

    unused_mask marks further rows that are kept but not used. Returns (rows (total, ...), indices (total) of the rows
    in the flattened batch, cu_seqlens (batch + 1, int32), the longest sequence (int), used lengths (batch, int32)).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    rows, indices, cu_seqlens, longest = _gather(hidden_states, kept, kept.sum(dim=-1, dtype=torch.int32))
    return rows, indices, cu_seqlens, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Like unpad_input, for rows that hold several sequences one after the other.

    attention_mask_in_length (batch, seqlen, int) begins with the lengths of the row's sequences, zeros after them. For
    example, [2, 3, 0, 0, 0, 0] is a sequence of 2, a sequence of 3, and padding. Returns (rows, indices, cu_seqlens,
    longest).
    """
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=filled.device) < filled
    return _gather(hidden_states, kept, attention_mask_in_length[attention_mask_in_length > 0])


def pad_input(hidden_states, indices, batch, seqlen):
    """Inverts unpad_input: (batch, seqlen, ...) with hidden_states (total, ...) at indices, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _gather(hidden_states, kept, lengths):
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())
