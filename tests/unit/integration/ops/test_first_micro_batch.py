# SPDX-License-Identifier: Apache-2.0
"""Layers that are told which micro-batch is an iteration's first, where none is."""

from __future__ import annotations

import torch

from megatron_resihp.integration.ops.first_micro_batch import treat_all_alike


class EngineLinear(torch.nn.Linear):
    """As Megatron wraps Transformer Engine's."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False

    @property
    def told(self) -> bool | None:
        return None if self.disable_parameter_transpose_cache else self.is_first_microbatch


def test_no_layer_hears_that_a_micro_batch_is_the_first() -> None:
    chunks = [torch.nn.Sequential(EngineLinear(), torch.nn.ReLU()), torch.nn.Sequential(EngineLinear())]
    layers = [module for chunk in chunks for module in chunk if isinstance(module, EngineLinear)]
    assert [layer.told for layer in layers] == [True, True]
    treat_all_alike(chunks)
    assert [layer.told for layer in layers] == [None, None]
    assert not hasattr(chunks[0][1], "disable_parameter_transpose_cache")
