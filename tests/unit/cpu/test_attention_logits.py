# SPDX-License-Identifier: Apache-2.0
"""The largest logits are those of the tokens to which attention is paid."""

import torch

from megatron_resihp.cpu.attention_logits import largest_logits

SCALE = 0.5


def test_later_tokens_and_masked_ones_do_not_count():
    """Two heads share keys; the second one's queries are the other way round."""
    query = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1) * torch.tensor([1.0, -1.0]).view(1, 1, 2, 1)
    key = torch.tensor([4.0, -1.0, 2.0]).view(3, 1, 1, 1)
    assert largest_logits(query, key, None, SCALE).tolist() == [6.0, 1.5]
    first = torch.tensor([[False, True, True], [True, False, True], [True, True, False]])
    assert largest_logits(query, key, first, SCALE).tolist() == [3.0, 1.0]
