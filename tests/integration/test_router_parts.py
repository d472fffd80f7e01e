# SPDX-License-Identifier: Apache-2.0
"""Routers that weigh the tokens of a part of a sequence against each other: where stages cut sequences otherwise, and
after a death, each expert gets the tokens that stock Megatron gives it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, FP32, Jobs, ask_at, check_training, tiny
from stock_runs import check_like_stock, stock_steps
from test_plan_failures import are_heterogeneous
from test_plans import stages
from test_query_groups import plan

from megatron_resihp.report.run.summary import compare

MODEL: dict[str, Any] = EXPERTS | {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 2, "global_batch_size": 4,
    "train_iters": 13, "eval_interval": 6, "eval_iters": 1,
}  # fmt: skip
"""Two members in each of two replicas, and two layers."""
SINKHORN: dict[str, Any] = {
    "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1, "moe_aux_loss_coeff": None,
}  # fmt: skip
UNEVEN: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": True}
DROPPING: dict[str, Any] = {"moe_expert_capacity_factor": 0.75}
PADDED: dict[str, Any] = {"moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "without"),
    [
        (SINKHORN, UNEVEN),
        (SINKHORN | RECOMPUTED | {"use_distributed_optimizer": True}, UNEVEN),
        (DROPPING, {"moe_expert_capacity_factor": None}),
        (DROPPING | PADDED, {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": None}),
        (DROPPING | {"moe_token_drop_policy": "position"}, {"moe_expert_capacity_factor": None}),
    ],
    ids=["sinkhorn", "sinkhorn, recomputed", "unlikely tokens dropped", "padded", "late tokens dropped"],
)
def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path, model: dict[str, Any], without: dict[str, Any]) -> None:
    """First stages with more members, whose parts are pieces of the job's own; later ones with fewer. They evaluate,
    too."""
    own, more = plan(stages([0, 1]), stages([2, 3])), plan(stages([0, 1, 2, 3]))
    fewer, left = plan(stages([2], [1, 0])), plan(stages([0, 1]))
    model = MODEL | model
    words = ask_at(tmp_path, (more, 2), (own, 4), (fewer, 9), (left, 11))
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@7:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, True, False, False, True, False]
    stock = stock_steps(jobs, 4, **model)
    check_like_stock(job, stock)
    # The control: experts that all get what they are given train another model.
    otherwise = jobs.reference(tiny(**model | without), workers=4)
    assert (compare(job.summary.loss, otherwise.summary.loss) or 0) > 100 * FP32.loss
