# SPDX-License-Identifier: Apache-2.0
"""What replicas evaluate, where there may be less to evaluate than replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.patches.schedule import wrap_get_forward_backward_func
from megatron_resihp.plan import ParallelPlan, Replica


def schedule(**options: Any) -> list[dict[str, torch.Tensor]]:
    """Megatron's, on a worker with the last stage: sum of losses and number of tokens of each micro-batch."""
    assert options["num_microbatches"] >= 1, "Megatron's schedules run at least one"
    return [{"lm loss": torch.tensor([6.0, 2.0])} for _ in range(options["num_microbatches"])]


@pytest.mark.parametrize(("micro_batches", "counted"), [(2, [1, 1, 0]), (3, [1, 1, 1]), (5, [2, 2, 1])])
def test_each_micro_batch_counts_once(micro_batches: int, counted: list[int]) -> None:
    """Of three replicas. Who has none runs one as well, or the others would wait for it where sums are taken."""
    plan = ParallelPlan(tuple(Replica(((each,),), (each,)) for each in range(3)))
    for replica, expected in enumerate(counted):
        runtime: Any = SimpleNamespace(heterogeneous=None, current_plan=plan, replica=replica, reach=lambda point: None)
        losses = wrap_get_forward_backward_func(runtime, lambda: schedule)()(
            forward_only=True, num_microbatches=micro_batches
        )
        assert len(losses) >= 1
        assert sum(each["lm loss"].tolist()[0] for each in losses) == 6.0 * expected
        assert sum(each["lm loss"].tolist()[1] for each in losses) == 2.0 * expected
