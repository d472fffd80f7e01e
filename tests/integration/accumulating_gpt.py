# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with a kernel that adds weight gradients to buffers, as the fused one that only GPUs have.

In Megatron 0.19 all of its own column-parallel layers take --defer-embedding-wgrad-compute for theirs, and fail. It is
for the head, beside layers of Transformer Engine, which do not look at it; neither do the others here.
"""

import copy
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

PRETRAIN = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    total += gradient.t().matmul(inputs)


kernel = ModuleType("fused_weight_gradient_mlp_cuda")
vars(kernel).update(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
sys.modules[kernel.__name__] = kernel
vars(layers).update(fused_weight_gradient_mlp_cuda=kernel, _grad_accum_fusion_available=True)

plain_init = layers.ColumnParallelLinear.__init__


def init(self: Any, *positional: Any, **options: Any) -> None:
    plain_init(self, *positional, **options)
    if self.embedding_activation_buffer is None and self.config.defer_embedding_wgrad_compute:
        self.config = copy.copy(self.config)
        self.config.defer_embedding_wgrad_compute = False


layers.ColumnParallelLinear.__init__ = init  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_path(str(PRETRAIN), run_name="__main__")
