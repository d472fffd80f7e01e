# SPDX-License-Identifier: Apache-2.0
"""What stands for the kernels of Flash Linear Attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron_resihp.cpu.linear_attention import causal_convolution, normalize


@pytest.mark.parametrize("biased", [True, False])
def test_each_channel_is_convolved_with_the_tokens_before(biased: bool) -> None:
    """As Megatron does it in --deterministic-mode: padded at both ends, of which the last are left out."""
    torch.manual_seed(1)
    x, weight = torch.randn(2, 7, 3), torch.randn(3, 4)
    bias = torch.randn(3) if biased else None
    found, state = causal_convolution(x=x, weight=weight, bias=bias, activation="silu", initial_state=None)
    padded = functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=3, groups=3)[..., :7]
    assert state is None
    torch.testing.assert_close(found, functional.silu(padded).transpose(1, 2))


def test_vectors_have_length_one() -> None:
    torch.testing.assert_close(normalize(torch.randn(2, 5, 8)).norm(dim=-1), torch.ones(2, 5), atol=1e-5, rtol=0)
    assert not normalize(torch.zeros(3)).any(), "nothing is divided by 0"
