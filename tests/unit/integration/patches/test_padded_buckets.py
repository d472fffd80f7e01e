# SPDX-License-Identifier: Apache-2.0
"""What is saved of a distributed optimizer whose buckets are padded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.integration.patches.padded_buckets import with_padding, wrap_fully_reshardable

FIRST, SECOND = SimpleNamespace(offset=0, numel_unpadded=2), SimpleNamespace(offset=4, numel_unpadded=3)
BUFFER = SimpleNamespace(numel=8, numel_unpadded=5, buckets=[FIRST, SECOND])
GATHERED: dict[str, Any] = {"exp_avg": torch.tensor([1.0, 2, 3, 4, 5]), "numel_unpadded": 5}


def test_buckets_are_where_they_are_in_the_buffer() -> None:
    found = with_padding(GATHERED, BUFFER)
    assert found["exp_avg"].tolist() == [1, 2, 0, 0, 3, 4, 5, 0] and found["numel_unpadded"] == 5


def test_a_buffer_without_padding_is_left_as_it_is() -> None:
    plain = SimpleNamespace(numel=5, numel_unpadded=5, buckets=[])
    assert with_padding(GATHERED, plain)["exp_avg"] is GATHERED["exp_avg"]


def test_megatron_s_other_formats_still_get_buckets_without_padding() -> None:
    """Which it puts into buffers by their own sizes."""

    class Optimizer:
        buffers = [BUFFER]

        def get_parameter_state_dp_zero(self, **how: Any) -> Any:
            return {"buckets_coalesced": True, 0: {"fp32": GATHERED}}

    def save(self: Any, is_loading: bool) -> Any:
        return self.get_parameter_state_dp_zero(empty_data=is_loading)[0]["fp32"]["exp_avg"]

    optimizer = Optimizer()
    assert wrap_fully_reshardable(save)(optimizer, is_loading=False).shape == (8,)
    assert optimizer.get_parameter_state_dp_zero()[0]["fp32"] is GATHERED
