# SPDX-License-Identifier: Apache-2.0
"""What all workers agree on before they step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from megatron_resihp.control.worker.heard import Heard
from megatron_resihp.executor.groups.waiting import Waiter
from megatron_resihp.integration.loop import standby
from megatron_resihp.integration.ops.program_schedule import check_gradients
from megatron_resihp.integration.progress import Orders, Progress
from megatron_resihp.integration.step.expert_loads import LoadCounter
from megatron_resihp.integration.step.step import SHARED_COUNTERS, ZEROS, agree, install_step, see_reduced
from megatron_resihp.protocol.records import IterationPhase


def worker(checks: bool, others: float, *scalers: Any, counts_zeros: bool = False) -> Any:
    """A standby, and what the others bring of the squared norm; they count 40 zeros."""
    parts = [SimpleNamespace(grad_scaler=scaler) for scaler in scalers or (None,)]

    def add_those_of_others(values: torch.Tensor) -> None:
        values[0] += others
        values[ZEROS] += 40

    return SimpleNamespace(
        worker=3, epoch=1, view=SimpleNamespace(works=False, reports=False), orders=Orders(), change=None,
        job=SimpleNamespace(
            args=SimpleNamespace(
                check_for_nan_in_loss_and_grad=checks, num_experts=None, log_num_zeros_in_grad=counts_zeros,
                mtp_num_layers=None, qk_clip=False, log_max_attention_logit=False,
            ),
            minutes=None, batch_steps=(),
        ),
        saves=SimpleNamespace(is_wanted=False), loads=LoadCounter(2, 0, 1),
        control=SimpleNamespace(heard=Heard(3, lambda: None, 1), epoch=1), progress=Progress(iteration=5),
        mode=SimpleNamespace(
            everybody=SimpleNamespace(sum=add_those_of_others, workers=(0, 3)), seen_documents=None
        ),
        held=SimpleNamespace(live=SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=parts))),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_resihp.integration.step.step.note_counters", lambda runtime, values: None)


@pytest.mark.parametrize("others", [math.nan, math.inf])
def test_nobody_steps_with_a_norm_that_is_no_number(others: float) -> None:
    with pytest.raises(RuntimeError, match=r"Worker 3, iteration 5: Unexpected result (nan|inf)"):
        agree(worker(checks=True, others=others), 0.0)


def test_it_is_for_megatrons_flag_to_say() -> None:
    assert math.isnan(agree(worker(checks=False, others=math.nan), 0.0).grad_norm or 0.0)
    assert agree(worker(checks=True, others=9.0), 16.0).grad_norm == 5.0


@pytest.mark.parametrize("others", [math.nan, math.inf])
def test_with_a_loss_scale_such_a_step_is_skipped(others: float) -> None:
    """Also with Megatron's own check, which is of what has not been summed yet."""
    outcome = agree(worker(True, others, object(), None), 0.0)
    assert outcome.skipped and outcome.grad_norm is None
    taken = agree(worker(True, 9.0, object()), 16.0)
    assert not taken.skipped and taken.grad_norm == 5.0


def test_zeros_are_counted_where_megatron_would() -> None:
    assert agree(worker(True, 9.0, counts_zeros=True), 16.0, zeros=2).zeros == 42
    assert agree(worker(True, 9.0), 16.0).zeros is None
    skipped = agree(worker(True, math.inf, object(), counts_zeros=True), 0.0, zeros=2)
    assert skipped.zeros is None, "Megatron counts none of a step that it skips"


def reporting(count: int) -> Any:
    """The worker that tells of each iteration, whose loss function has reported losses of 10 tokens each, twice."""
    runtime = worker(True, 9.0)
    runtime.view = SimpleNamespace(works=True, reports=True, is_last_stage=True, tp_rank=0)
    runtime.progress.losses = [{f"loss {n:02}": torch.tensor([float(n), 10.0]) for n in range(count)}] * 2
    runtime.progress.counters[5] = dict.fromkeys(SHARED_COUNTERS, 0)
    return runtime


def test_all_losses_of_a_user_s_function_are_agreed_on(capsys: pytest.CaptureFixture[str]) -> None:
    means = agree(reporting(16), 16.0).means
    assert means == pytest.approx({f"loss {n:02}": n / 10 for n in range(16)})
    assert not capsys.readouterr().err


def test_losses_for_which_there_is_no_room_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    runtime = reporting(18)
    for _ in range(2):
        assert [*agree(runtime, 16.0).means] == [f"loss {n:02}" for n in range(16)]
    [line] = capsys.readouterr().err.splitlines()
    assert "reports 18 losses" in line and line.endswith("it does not log: loss 16, loss 17")


def test_no_timer_of_the_step_waits_for_others() -> None:
    """Once a step is agreed on, it is taken, whoever dies; and standbys, which take it too, are in no world."""
    runtime = worker(True, 0.0, None, None)
    for part in runtime.held.live.optimizer.chained_optimizers:
        part.config = SimpleNamespace(barrier_with_L1_time=True)
    install_step(runtime)
    assert [part.config.barrier_with_L1_time for part in runtime.held.live.optimizer.chained_optimizers] == [False] * 2


def chunk(*norms: float, checks: bool = True) -> Any:
    """What Megatron's DDP makes of a model chunk, with a bucket for each of these gradients."""
    groups = []
    for norm in norms:
        group = object.__new__(_ParamAndGradBucketGroup)
        group.buckets = [SimpleNamespace(grad_data=torch.tensor([0.0, norm]))]
        groups.append(group)
    settings = SimpleNamespace(check_for_nan_in_grad=checks, check_for_large_grads=False)
    return SimpleNamespace(ddp_config=settings, bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:])


@pytest.mark.parametrize("spoiled", [(math.nan, 1.0), (1.0, math.inf)])
def test_megatrons_check_of_gradients_is_made(monkeypatch: pytest.MonkeyPatch, spoiled: tuple[float, ...]) -> None:
    """Which its DDP makes where it begins to communicate; a plan's own schedule doesn't use that."""
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_gradients([chunk(1.0, 1.0), chunk(*spoiled, checks=False)])
    with pytest.raises(RuntimeError, match=r"found (NaN|Inf) in local grad norm for bucket #0"):
        check_gradients([chunk(1.0, 1.0), chunk(*spoiled)])


@pytest.mark.parametrize("standing_by", [False, True], ids=["working", "standing by"])
def test_gradients_count_once_the_device_has_them_and_nccl_has_no_error(
    monkeypatch: pytest.MonkeyPatch, standing_by: bool
) -> None:
    """A standby may get its gradients from device to device, where the host is told before they have come."""
    done: list[str] = []

    def check() -> None:
        done.append("check")
        raise dist.DistBackendError("NCCL group peers: REMOTE_ERROR")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    runtime = worker(checks=True, others=0.0)
    runtime.communicators = SimpleNamespace(waiter=Waiter(lambda: False), connections=SimpleNamespace(check=check))
    runtime.mode.nccl_failed = lambda: done.append("noted")
    runtime.mode.begin_iteration = lambda: done.append("begin")
    runtime.mode.share_gradients = lambda: done.append("share")
    runtime.scheduled = SimpleNamespace(ask_for_plans=lambda iteration, reports: None)
    monkeypatch.setattr(standby, "share_extra_state", lambda runtime: None)
    with pytest.raises(dist.DistError, match="REMOTE_ERROR"):
        standby.keep_current(runtime) if standing_by else see_reduced(runtime)
    assert done[-3:] == ["synchronize", "check", "noted"]
    assert runtime.progress.stage is IterationPhase.COMPUTE
