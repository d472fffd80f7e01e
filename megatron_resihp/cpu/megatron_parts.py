# SPDX-License-Identifier: Apache-2.0
"""The few places in Megatron that refuse to run without a GPU's kernels. May import torch and megatron."""

import copy
import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_resihp.cpu.attention_logits import are_wanted
from megatron_resihp.cpu.context_attention import causal_mask, whole_sequence
from megatron_resihp.cpu.norms import build_norm
from megatron_resihp.cpu.packed_attention import document_lengths, packed_attention

CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal)


def install() -> None:
    install_packed_attention()
    install_context_attention()
    DotProductAttention.__init__ = _accepting_head_sizes(DotProductAttention.__init__)
    WrappedTorchNorm.__new__ = build_norm
    layers.ColumnParallelLinear.__init__ = _deferring_in_the_head_only(layers.ColumnParallelLinear.__init__)
    # Without this, half precision would look for a fused CUDA kernel.
    FusedScaleMaskSoftmax.is_kernel_available = _no_kernel
    if not layers._grad_accum_fusion_available:
        kernels = weight_gradient_kernels()
        layers.fused_weight_gradient_mlp_cuda = kernels
        layers._grad_accum_fusion_available = True
        # Weight gradients of the head that are left for later import it where they are computed.
        sys.modules[kernels.__name__] = kernels


def install_packed_attention() -> None:
    """Let Megatron's own attention take packed documents, on any device."""
    DotProductAttention.forward = _accepting_packed_documents(DotProductAttention.forward)


def install_context_attention() -> None:
    """Let Megatron's own attention take sequences that several workers share."""
    DotProductAttention.__init__ = _accepting_shared_sequences(DotProductAttention.__init__)
    DotProductAttention.forward = _attending_to_whole_sequences(DotProductAttention.forward)


def _accepting_shared_sequences(original: Callable[..., None]) -> Callable[..., None]:
    """It refuses them where it is built: Transformer Engine's counterpart alone knows how to attend."""

    @functools.wraps(original)
    def initialize(self: DotProductAttention, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *arguments, **options)
        self.config = config

    return initialize


def _attending_to_whole_sequences(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(
        self: DotProductAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        if packed_seq_params is not None or self.scale_mask_softmax.window_size is not None:
            raise NotImplementedError("shared sequences on a CPU support neither packed documents nor a window")
        if (attn_mask_type or self.attn_mask_type) not in CAUSAL_MASKS:
            raise NotImplementedError("shared sequences on a CPU need causal attention")
        group = parallel_state.get_context_parallel_group()
        key, value = whole_sequence(key, group), whole_sequence(value, group)
        mask = causal_mask(group.rank(), group.size(), key.size(0))
        return original(self, query, key, value, mask, attn_mask_type, attention_bias)

    return forward


def _accepting_head_sizes(original: Callable[..., None]) -> Callable[..., None]:
    """Latent attention has keys and values of other sizes than the rest of the model, and says so to Transformer
    Engine's attention only."""

    @functools.wraps(original)
    def initialize(
        self: DotProductAttention,
        config: TransformerConfig,
        *arguments: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        if k_channels is not None and options.get("softmax_scale") is None:
            options["softmax_scale"] = k_channels**-0.5
        original(self, config, *arguments, **options)
        if v_channels is not None:
            # Read where the heads are put together only.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return initialize


def _deferring_in_the_head_only(original: Callable[..., None]) -> Callable[..., None]:
    """`--defer-embedding-wgrad-compute` is meant for the head. On a GPU it alone is a layer of this class; those that
    are Transformer Engine's there don't know the flag, and have no buffers for it."""

    @functools.wraps(original)
    def initialize(
        self: layers.ColumnParallelLinear,
        *sizes: int,
        config: TransformerConfig,
        embedding_activation_buffer: list[Tensor] | None = None,
        **options: Any,
    ) -> None:
        if config.defer_embedding_wgrad_compute and embedding_activation_buffer is None:
            config = copy.copy(config)
            config.defer_embedding_wgrad_compute = False
        original(self, *sizes, config=config, embedding_activation_buffer=embedding_activation_buffer, **options)

    return initialize


def _no_kernel(self: FusedScaleMaskSoftmax, *_shape: Any) -> bool:
    return False


def _accumulate_weight_gradient(layer_input: Tensor, output_gradient: Tensor, weight_gradient: Tensor) -> None:
    """Do the work of Apex's kernel behind `--gradient-accumulation-fusion`, Megatron's default."""
    weight_gradient.add_(output_gradient.t().matmul(layer_input))


def weight_gradient_kernels() -> ModuleType:
    """What stands for Apex's module."""
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    for width in ("fp32", "fp16"):
        setattr(module, f"wgrad_gemm_accum_{width}", _accumulate_weight_gradient)
    return module


def _accepting_packed_documents(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`DotProductAttention.forward` refuses packed documents; Transformer Engine's counterpart needs a GPU."""

    @functools.wraps(original)
    def forward(
        self: DotProductAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            return original(self, query, key, value, attention_mask, attn_mask_type, attention_bias)
        _check_packed_attention(self, attn_mask_type, attention_bias)
        dropout = self.attention_dropout.p if self.training else 0.0
        # Under sequence parallelism the caller has forked the generator already, as in the original.
        fork_needed = dropout > 0.0 and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork_needed else nullcontext():
            context = packed_attention(query, key, value, _lengths(packed_seq_params), self.softmax_scale, dropout)
        return context.flatten(start_dim=1)

    return forward


def _check_packed_attention(
    attention: DotProductAttention, mask_type: AttnMaskType | None, bias: Tensor | None
) -> None:
    if (mask_type or attention.attn_mask_type) not in CAUSAL_MASKS:
        raise NotImplementedError("packed documents on a CPU need causal attention")
    if bias is not None or attention.softmax_offset is not None:
        raise NotImplementedError("packed documents on a CPU support no attention bias and no softmax offset")
    if attention.scale_mask_softmax.window_size is not None:
        raise NotImplementedError("packed documents on a CPU support no attention window")
    if are_wanted(attention.config):
        raise NotImplementedError("packed documents on a CPU tell of no largest logits")


def _lengths(packed: PackedSeqParams) -> list[int]:
    """The documents' lengths as they lie in the sequence, padding between them included."""
    padded = packed.cu_seqlens_q_padded
    return document_lengths(packed.cu_seqlens_q if padded is None else padded)
