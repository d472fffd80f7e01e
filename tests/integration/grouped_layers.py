# SPDX-License-Identifier: Apache-2.0
"""Megatron's own experts for --moe-grouped-gemm on any device: `TEGroupedMLP` of `TEGroupedLinear` layers.

Megatron defines the latter where Transformer Engine is installed only. So the file that does is run once more, beside
the module that all others use, with one class of Transformer Engine's that computes, and mocks of all the rest.
"""

import importlib.util
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock, patch

import torch
from megatron.core import utils
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from packaging.version import Version

ENGINE: Final = "transformer_engine"
VERSION: Final = Version("2.6")
"""Newer ones need more of it than one class."""


class GroupedLinear(torch.nn.Module):
    """Stands for Transformer Engine's: the experts' products, one after another, by a weight for each."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, init_method: Any, params_dtype: torch.dtype,
        bias: bool, return_bias: bool, parallel_mode: str | None, tp_size: int, get_rng_state_tracker: Any,
        rng_tracker_name: str, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1 or parallel_mode is None
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.tp_size = bias, return_bias, tp_size
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        with get_rng_state_tracker().fork(rng_tracker_name) if get_rng_state_tracker else nullcontext():
            for index in range(num_gemms):
                weight = torch.empty(out_features, in_features, dtype=params_dtype)
                init_method(weight)
                self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))
                if bias:
                    self.register_parameter(
                        f"bias{index}", torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))
                    )

    def forward(self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inputs)
        biases = [self.get_parameter(f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        added = biases or [None] * self.num_gemms
        if self.return_bias:
            added = [None] * self.num_gemms
        weights = (self.get_parameter(f"weight{index}") for index in range(self.num_gemms))
        parts = zip(inputs.split(m_splits), weights, added, strict=True)
        out = torch.cat([torch.nn.functional.linear(*part) for part in parts])
        return (out, biases) if self.return_bias else out

    def init_fp8_metadata(self, num_gemms: int) -> None:
        pass

    def get_extra_state(self) -> torch.Tensor:
        """As Transformer Engine's without 8 bits."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert not state.numel()


def engine_layers() -> ModuleType:
    """Megatron's module of layers for Transformer Engine, as it is where that is installed."""
    engine = MagicMock(__version__=str(VERSION))
    engine.pytorch.GroupedLinear = GroupedLinear
    mocked = {ENGINE: engine, f"{ENGINE}.pytorch": engine.pytorch, f"{ENGINE}.pytorch.fp8": engine.pytorch.fp8}
    path = transformer_engine.__file__
    spec = importlib.util.spec_from_file_location("layers_of_transformer_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {**mocked, spec.name: module}), patch.object(utils, "_te_version", VERSION):
        spec.loader.exec_module(module)
    module.is_te_min_version = lambda version, check_equality=True: (  # type: ignore[attr-defined]
        Version(version) < VERSION or (check_equality and Version(version) == VERSION)
    )
    return module


def grouped_experts() -> partial[TEGroupedMLP]:
    """What makes a layer's experts, as Megatron's own specification of layers with Transformer Engine does."""
    made = engine_layers()
    layers = GroupedMLPSubmodules(
        linear_fc1=made.TEColumnParallelGroupedLinear, linear_fc2=made.TERowParallelGroupedLinear
    )
    return partial(TEGroupedMLP, submodules=layers)
