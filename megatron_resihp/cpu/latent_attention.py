# SPDX-License-Identifier: Apache-2.0
"""Latent attention whose members share what leads to latents, as with Transformer Engine's layers.

Megatron's own layers cut it between members, and gather the results. In the backward pass each member then keeps its
own part of what its own heads have made of positions: those of other members' heads are missing in it. May import
megatron.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


def install() -> None:
    MLASelfAttention._qkv_down_projection = _giving_whole_latents(MLASelfAttention._qkv_down_projection)


def _giving_whole_latents(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Each member gets all latents of its part of the sequence. Megatron gathers that over the sequence where it needs
    it, and sums gradients there."""

    @functools.wraps(original)
    def project(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        queries, latents = original(self, hidden_states)
        whole = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if latents.size(-1) != whole and self.config.sequence_parallel:
            latents = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latents))
        return queries, latents

    return project
