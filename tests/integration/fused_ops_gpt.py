# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with Megatron's experts for Transformer Engine's op fuser, on any device.

Megatron's own `TEGroupedMLP` builds its fused ops in the first forward pass, around the parameters of two layers whose
own forward passes are never called. Those layers and ops are Transformer Engine's. Here torch computes the same.

In a job it does what files in RUN_DIR/wishes ask for, as wishing_gpt.py does; without the plugin it notes steps as
noting_gpt.py does.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.tensor_parallel.random import (  # noqa: E402
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe import experts  # noqa: E402
from noting_gpt import run_or_note  # noqa: E402


class Layer(torch.nn.Module):
    """Stands for TEGroupedLinear: a weight for each expert."""

    single_grouped_weight = single_grouped_bias = use_bias = delay_wgrad_compute = fuse_wgrad_accumulation = False

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, config: Any, init_method: Any, **_: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for index in range(num_gemms):
                weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))
                init_method(weight.data)
                weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"weight{index}", weight)

    def forward(self, *_: Any) -> Any:
        raise AssertionError("the op fuser takes its place")


class GroupedLinear(torch.nn.Module):
    """Stands for the op: the experts' products, one after another."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.num_groups = num_groups
        for index in range(num_groups):
            weight = torch.empty(out_features, in_features, device="meta", dtype=dtype)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))

    def forward(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = (self.get_parameter(f"weight{index}") for index in range(self.num_groups))
        parts = zip(values.split(counts.tolist()), weights, strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts])


class ScaledSwiGLU(torch.nn.Module):
    def __init__(self, glu_interleave_size: int | None) -> None:
        super().__init__()
        assert glu_interleave_size is None

    def forward(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        gate, up = values.chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up * scales.unsqueeze(-1)).to(values.dtype)


class Sequential(torch.nn.Sequential):
    """Stands for the fuser: each op has an input of its own besides."""

    def forward(self, values: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for op, other in zip(self, others, strict=True):
            values = op(values, other)
        return values


if __name__ == "__main__":
    ops = SimpleNamespace(GroupedLinear=GroupedLinear, ScaledSwiGLU=ScaledSwiGLU, Sequential=Sequential)
    experts.HAVE_TE, experts.te = True, SimpleNamespace(pytorch=SimpleNamespace(ops=ops))
    experts.TEGroupedMLP._is_fused_impl_supported = lambda self: True
    layers = experts.GroupedMLPSubmodules(linear_fc1=Layer, linear_fc2=Layer)
    backends.LocalSpecProvider.grouped_mlp_modules = (  # type: ignore[method-assign]
        lambda self, grouped: partial(experts.TEGroupedMLP, submodules=layers)
    )
    run_or_note(pretrain_gpt)
