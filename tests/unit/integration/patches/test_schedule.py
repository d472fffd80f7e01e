# SPDX-License-Identifier: Apache-2.0
"""What Megatron is told of the losses of a worker that has none, and how large it takes micro-batches for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_resihp.integration.patches.schedule import wrap_get_forward_backward_func
from megatron_resihp.integration.step.expert_loads import LoadCounter

LOSSES = [{"lm loss": 2.5}]


def run(losses: list[dict[str, Any]], **call: Any) -> tuple[Any, Any]:
    """What Megatron gets, and what is kept of it, where the plan's mode reports these."""
    runtime, progress = job(losses), SimpleNamespace(losses=None, iteration=1)
    runtime.progress = progress
    return wrap_get_forward_backward_func(runtime, lambda: lambda: [])()(**call), progress.losses


def job(losses: list[dict[str, Any]]) -> Any:
    args = SimpleNamespace(qk_clip=False, log_max_attention_logit=False, micro_batch_size=1, eval_micro_batch_size=2)
    sizes: list[int] = []

    def report(*_: Any) -> list[dict[str, Any]]:
        sizes.append(args.micro_batch_size)
        return losses

    return SimpleNamespace(
        mode=SimpleNamespace(train=report, evaluate=report), progress=SimpleNamespace(losses=None, iteration=1),
        sizes=sizes,
        probes=SimpleNamespace(begin_schedule=lambda: None), reach=lambda point: None, job=SimpleNamespace(args=args),
        held=SimpleNamespace(live=SimpleNamespace(model=[])), loads=LoadCounter(1, 0, 1),
    )  # fmt: skip


@pytest.mark.parametrize("call", [{}, {"forward_only": True}], ids=["training", "evaluating"])
def test_a_worker_without_the_head_has_a_first_report_of_no_losses(call: dict[str, Any]) -> None:
    """Megatron 0.18 takes the names of the losses from the first report."""
    told, _ = run([], **call)
    assert [*told[0]] == []
    assert run(LOSSES, **call)[0] == LOSSES


def test_what_is_agreed_on_is_what_was_reported() -> None:
    assert run([])[1] == []
    assert run(LOSSES)[1] == LOSSES


def test_batches_of_an_evaluation_have_their_own_size() -> None:
    """Megatron's script asks the argument of training for it."""
    runtime = job(LOSSES)
    schedule = wrap_get_forward_backward_func(runtime, lambda: lambda: [])()
    for call in ({"forward_only": True}, {}):
        schedule(**call)
    assert runtime.sizes == [2, 1]
