# SPDX-License-Identifier: Apache-2.0
"""Torch's norms in Megatron without its refusals: of sequence parallelism, and of gains around 0. May import torch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class CenteredLayerNorm(torch.nn.LayerNorm):
    """`--apply-layernorm-1p`: the gain is 1 + weight, and the weight begins at 0."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class CenteredRMSNorm(torch.nn.RMSNorm):
    """The same without a mean and a bias."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


CENTERED: dict[str, type[torch.nn.Module]] = {"LayerNorm": CenteredLayerNorm, "RMSNorm": CenteredRMSNorm}


def build_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> torch.nn.Module:
    """Replaces `WrappedTorchNorm.__new__`.

    Persistent and memory-saving kernels compute the same numbers, so they are not refused. Under sequence parallelism
    each rank sees a part of the tokens; the mark makes Megatron sum the norm's gradients over tensor-parallel ranks.
    """
    if config.normalization not in NORMS:
        raise NotImplementedError(f"--normalization {config.normalization} has no counterpart on a CPU")
    norms = CENTERED if config.layernorm_zero_centered_gamma else NORMS
    norm = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    if config.fp32_residual_connection:
        norm.register_forward_pre_hook(_narrowed)
    return norm


def _narrowed(norm: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What comes in as wide as the residual connection, as wide as the gains: layers after the norm want that."""
    first, *others = given
    return (first.to(norm.weight.dtype), *others)
