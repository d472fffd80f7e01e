# SPDX-License-Identifier: Apache-2.0
"""Torch's norms in Megatron without its refusals of sequence parallelism. May import torch."""

from typing import Any

import torch

NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def build_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> torch.nn.Module:
    """Replaces `WrappedTorchNorm.__new__`.

    Persistent and memory-saving kernels compute the same numbers, so they are not refused. Under sequence parallelism
    each rank sees a part of the tokens; the mark makes Megatron sum the norm's gradients over tensor-parallel ranks.
    """
    if config.layernorm_zero_centered_gamma:
        raise NotImplementedError("--apply-layernorm-1p needs Transformer Engine or Apex")
    if config.normalization not in NORMS:
        raise NotImplementedError(f"--normalization {config.normalization} has no counterpart on a CPU")
    norm = NORMS[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
