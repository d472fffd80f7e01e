# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets without the kernels of Flash Linear Attention and the layers of Transformer Engine.

Megatron has the rule itself in torch, for `--deterministic-mode`; the rest is short. May import torch and megatron.
"""

from importlib import import_module
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6
"""Of the kernels' normalization."""


class NormedColumnParallelLinear(ColumnParallelLinear):
    """A norm and a linear layer, which Transformer Engine has in one."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = WrappedTorchNorm(config, input_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor, *arguments: Any, **options: Any) -> Any:
        return super().forward(self.norm(input_), *arguments, **options)


class Backend(LocalSpecProvider):
    """Megatron's own layers, and the one that it lacks."""

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnParallelLinear


def install() -> None:
    specs._get_backend_spec_provider = lambda config: Backend()
    specs._get_self_attention_module_spec = _attention_spec
    for module in _modules():
        module.causal_conv1d = causal_convolution
        module.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule
        module.l2norm = normalize
        module.HAVE_FLA = True


def _modules() -> list[Any]:
    """In which Megatron's layer looks for the kernels: one in 0.18, two of a package in 0.19."""
    if not hasattr(gated_delta_net, "__path__"):
        return [gated_delta_net]
    return [import_module(f"{gated_delta_net.__name__}.{name}") for name in ("common", "gdn")]


def _attention_spec(config: Any, backend: Any = None) -> ModuleSpec:
    """Of layers whose attention is Megatron's usual one."""
    layer = get_gpt_layer_local_spec(
        config.num_moe_experts, config.moe_grouped_gemm, config.qk_layernorm, config.multi_latent_attention,
        normalization=config.normalization, qk_l2_norm=config.qk_l2_norm,
    )  # fmt: skip
    attention: ModuleSpec = layer.submodules.self_attention
    attention.metainfo["fuse_input_layernorm"] = False
    return attention


def normalize(x: Tensor, dim: int = -1, eps: float = EPSILON) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, **_options: Any) -> tuple[Tensor, None]:
    """A convolution of each channel over the tokens before, and SiLU.

    Args:
        x: [batch, tokens, channels].
        weight: [channels, width].
        bias: [channels].
    """
    channels, width = weight.shape
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    convolved = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
    return functional.silu(convolved).transpose(1, 2), None
