# SPDX-License-Identifier: Apache-2.0
"""Causal attention over documents packed in one sequence, one document at a time. May import torch.

One attention per document costs the sum of the squared document lengths, as the packed kernels on a GPU do. A masked
attention over the whole sequence would cost the square of the sum and hide what packing does to a job's balance.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def document_lengths(cumulative_lengths: Tensor) -> list[int]:
    """[0, 5, 7, 11] -> [5, 2, 4]."""
    return cumulative_lengths.diff().tolist()


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, dropout: float = 0.0
) -> Tensor:
    """Attend within each document only.

    Args:
        query: [tokens, heads, head size].
        key, value: [tokens, groups, head size], where groups divides heads (grouped-query attention).
        lengths: of the documents in their order; they sum up to tokens.

    Returns:
        [tokens, heads, head size].
    """
    heads_per_group = query.size(1) // key.size(1)
    if heads_per_group > 1:
        key = key.repeat_interleave(heads_per_group, dim=1)
        value = value.repeat_interleave(heads_per_group, dim=1)
    documents = zip(*(_batch_of_one(tensor).split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    contexts = [
        scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale) for q, k, v in documents
    ]
    return torch.cat(contexts, dim=2).squeeze(0).transpose(0, 1)


def _batch_of_one(packed: Tensor) -> Tensor:
    """[tokens, heads, head size] -> [1, heads, tokens, head size]."""
    return packed.transpose(0, 1).unsqueeze(0)
