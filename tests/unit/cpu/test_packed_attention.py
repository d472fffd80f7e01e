# SPDX-License-Identifier: Apache-2.0
"""Attention per document equals attention over the whole sequence under a block-diagonal causal mask."""

import pytest
import torch

from megatron_resihp.cpu.packed_attention import document_lengths, packed_attention

SCALE = 0.3


def masked_attention(query, key, value, lengths):
    """The textbook formula over [tokens, heads, head size], with every forbidden score at minus infinity."""
    heads_per_group = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(heads_per_group, dim=1) for tensor in (key, value))
    allowed = torch.block_diag(*(torch.ones(length, length) for length in lengths)).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("lengths", [[12], [5, 2, 4, 1], [3, 0, 9], [1] * 12])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_output_and_gradients_equal_the_masked_reference(lengths, groups):
    torch.manual_seed(0)
    shapes = [(sum(lengths), 4, 8), (sum(lengths), groups, 8), (sum(lengths), groups, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    upstream = torch.randn(sum(lengths), 4, 6, dtype=torch.float64)
    packed = packed_attention(*inputs, lengths, SCALE)
    masked = masked_attention(*inputs, lengths)
    torch.testing.assert_close(packed, masked)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (packed, masked)]
    for from_packed, from_masked in zip(*gradients, strict=True):
        torch.testing.assert_close(from_packed, from_masked)


def test_lengths_that_miss_tokens_are_refused():
    tensors = [torch.zeros(6, 2, 4) for _ in range(3)]
    with pytest.raises(RuntimeError, match="split"):
        packed_attention(*tensors, [2, 3], SCALE)


def test_document_lengths():
    assert document_lengths(torch.tensor([0, 5, 7, 7, 11], dtype=torch.int32)) == [5, 2, 0, 4]
