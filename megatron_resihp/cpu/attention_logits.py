# SPDX-License-Identifier: Apache-2.0
"""The largest logits of attention, by head, which Megatron has from Transformer Engine only. May import torch and
megatron.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import arguments
from torch import Tensor

NEEDED: Final = "2.9.0"
"""The release of Transformer Engine without which Megatron refuses these flags. It asks for this one only there."""


def install() -> None:
    DotProductAttention.__init__ = _following(DotProductAttention.__init__)
    DotProductAttention.forward = _keeping_largest(DotProductAttention.forward)
    arguments.is_te_min_version = _knowing_logits(arguments.is_te_min_version)


def are_wanted(config: TransformerConfig) -> bool:
    """Whether a job clips by the largest logits, or logs them."""
    return bool(config.qk_clip or config.log_max_attention_logit)


def _knowing_logits(original: Callable[..., bool]) -> Callable[..., bool]:
    return lambda version, *others, **options: version == NEEDED or original(version, *others, **options)


def _following(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.current_max_attn_logits = None

    return initialize


def _keeping_largest(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *others: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        if are_wanted(self.config):
            if self.scale_mask_softmax.window_size is not None:
                raise NotImplementedError("windows on a CPU tell of no largest logits")
            found, known = largest_logits(query, key, attention_mask, self.softmax_scale), self.current_max_attn_logits
            self.current_max_attn_logits = found if known is None else torch.maximum(known, found)
        return original(self, query, key, value, attention_mask, *others, **options)

    return forward


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The largest logit of each head.

    Args:
        query: [tokens, batch, heads, channels].
        key: [tokens, batch, groups of heads, channels].
        mask: [..., tokens, tokens], True where no attention is paid; None: to later tokens.
        scale: of products.
    """
    key = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
    logits = torch.einsum("qbhc,kbhc->bhqk", query.float(), key.float()) * scale
    if mask is None:
        mask = torch.ones(query.size(0), key.size(0), dtype=torch.bool).triu(1)
    return logits.masked_fill(mask, float("-inf")).amax((0, 2, 3))
