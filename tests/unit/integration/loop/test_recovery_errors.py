# SPDX-License-Identifier: Apache-2.0
"""Which errors start a recovery, and which end the worker as they would in stock Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp import cpu
from megatron_resihp.control.worker.errors import EpochBroken, JobEnded
from megatron_resihp.executor.groups.errors import is_communicator_error
from megatron_resihp.executor.groups.rendezvous import RendezvousBroken
from megatron_resihp.executor.groups.waiting import WaitAbandoned
from megatron_resihp.integration.loop import device_loss, recovery
from megatron_resihp.integration.loop.notes import RecoveryNotes

# As torch 2.15 raises them.
OF_COMMUNICATORS = [
    torch.distributed.DistBackendError("NCCL error in: ..., remote process exited or there was a network error"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 50ms for recv"),
    RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors: Connection reset by peer"),
    RendezvousBroken("the epoch is broken"),
    WaitAbandoned("gloo did not answer after the epoch was broken"),
]
OF_THE_USER = [
    ValueError("connection closed by peer"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("found NaN in local grad norm for bucket #0 in backward pass"),
    AssertionError("Gloo"),
    KeyError("text"),
]
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory, NCCL"),
    MemoryError(),
    torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.30.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.30.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes"
    ),
]


def runtime(broken: bool, on_trial: bool = False) -> Any:
    return SimpleNamespace(
        on_trial=on_trial, joining=False,
        control=SimpleNamespace(
            heard=SimpleNamespace(broken=lambda: broken, broken_at=lambda: 1.0), suspect=lambda error, timeout_s: None
        ),
        job=SimpleNamespace(
            config=SimpleNamespace(resihp_answer_timeout=1.0), args=SimpleNamespace(distributed_backend="gloo")
        ),
        recovery=RecoveryNotes(),
    )  # fmt: skip


@pytest.mark.parametrize("error", [*OF_COMMUNICATORS, EpochBroken("worker 3: exit signal 9")], ids=repr)
def test_a_lost_peer_starts_a_recovery(error: Exception) -> None:
    assert recovery.is_ours(runtime(broken=False), error)


@pytest.mark.parametrize("error", OF_THE_USER, ids=repr)
def test_a_users_bug_is_raised_as_ever(error: Exception) -> None:
    assert not is_communicator_error(error)
    with pytest.raises(type(error)) as caught:
        recovery.recover(runtime(broken=False), error)
    assert caught.value is error


@pytest.mark.parametrize("error", OF_THE_USER[1:], ids=repr)
def test_what_a_broken_epoch_leads_to_is_no_bug(error: Exception) -> None:
    """An aborted collective may return garbage, which the model then stumbles over."""
    assert recovery.is_ours(runtime(broken=True), error)


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_too_little_memory_is_recovered_from_only_where_garbage_may_have_been_taken_for_a_size(
    error: Exception, broken: bool
) -> None:
    """As of tokens that experts are to get. Elsewhere another try would need as much."""
    assert recovery.is_ours(runtime(broken), error) == broken


@pytest.mark.parametrize(("backend", "recovers"), [("nccl", True), ("gloo", False)])
def test_a_peers_garbage_may_come_before_the_notice_of_what_has_led_to_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, recovers: bool
) -> None:
    """NCCL ends an aborted collective without its result, on a peer that has heard sooner."""
    monkeypatch.setattr(cpu, "installed", lambda: False)  # another test of this process may have
    late = runtime(broken=False)
    late.job.args.distributed_backend = backend
    late.control.heard.await_broken = lambda timeout_s: True
    error = RuntimeError("found NaN in local grad norm for bucket #0 in backward pass")
    meet(monkeypatch, [None])
    if recovers:
        recovery.recover(late, error)
    else:
        with pytest.raises(RuntimeError, match="NaN"):
            recovery.recover(late, error)


def test_a_fenced_worker_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epoch stays broken for ever: trying again would never end."""
    tried: list[int] = []

    def enter(runtime: Any, phases: Any, by_choice: bool) -> None:
        tried.append(len(tried))
        if len(tried) > 1:
            pytest.fail("tried again")
        raise JobEnded(75, "this worker was declared dead and is fenced")

    monkeypatch.setattr(recovery, "_enter_next_epoch", enter)
    with pytest.raises(JobEnded):
        recovery.recover(runtime(broken=True), EpochBroken("worker 3"))
    assert tried == [0]


def meet(monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None]) -> None:
    """Let each attempt to enter an epoch end with the next of these; None: it succeeds."""

    def enter(runtime: Any, phases: Any, by_choice: bool) -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(recovery, "_enter_next_epoch", enter)


def test_a_failure_during_recovery_starts_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Exception | None] = [OF_COMMUNICATORS[1], EpochBroken("worker 4"), None]
    suspected: list[BaseException] = []
    meet(monkeypatch, outcomes)
    worker = runtime(broken=False)
    worker.control.suspect = lambda error, timeout_s: suspected.append(error)
    recovery.recover(worker, EpochBroken("worker 3"))
    assert [str(error)[:8] for error in suspected] == ["worker 3", "[/pytorc", "worker 4"] and not outcomes
    assert worker.recovery.since == 1.0, "the time of the first death stays"


def recover_through(monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None], succession: object) -> list[str]:
    """Let a recovery meet these errors; returns what was reported."""
    suspected: list[str] = []
    meet(monkeypatch, outcomes)
    worker = runtime(broken=False)
    worker.held = SimpleNamespace(succession=succession)
    worker.control.suspect = lambda error, timeout_s: suspected.append(type(error).__name__)
    recovery.recover(worker, EpochBroken("worker 3"))
    assert not worker.recovery.ran_out, "the next recovery begins anew"
    return suspected


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_a_rebuild_that_runs_out_of_memory_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The old state is in host memory then."""
    assert recover_through(monkeypatch, [error, OF_COMMUNICATORS[1], None], object()) == [
        "EpochBroken", "TooLittleMemory", "RuntimeError",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "succession"),
    [([MemoryError("first"), MemoryError("last")], object()), ([MemoryError("last")], None)],
    ids=["again", "before anything is built"],
)
def test_memory_that_runs_out_all_the_same_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], succession: object
) -> None:
    with pytest.raises(MemoryError, match="last"):
        recover_through(monkeypatch, errors, succession)


def test_a_bug_that_a_recovery_meets_again_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it may be garbage of an aborted collective; while others fail too, it would be tried for ever."""
    errors = [KeyError("text"), *OF_COMMUNICATORS, ValueError("text"), *OF_COMMUNICATORS, KeyError("text")]
    tried = iter(errors)

    def enter(runtime: Any, phases: Any, by_choice: bool) -> None:
        raise next(tried)

    monkeypatch.setattr(recovery, "_enter_next_epoch", enter)
    with pytest.raises(KeyError) as caught:
        recovery.recover(runtime(broken=True), EpochBroken("worker 3"))
    assert caught.value is errors[-1] and next(tried, None) is None


class OnTrial:
    """A worker in the first step of a plan that was chosen; others follow without an error unless there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
        self.runtime = runtime(broken=False, on_trial=True)
        self.blamed: list[BaseException] = []
        self.suspected: list[BaseException] = []
        self.runtime.control.blame_plan = lambda error, timeout_s: self.blamed.append(error)
        self.runtime.control.suspect = lambda error, timeout_s: self.suspected.append(error)
        following = list(errors)

        def enter(runtime: Any, phases: Any, by_choice: bool) -> None:
            assert not runtime.on_trial
            if following:
                raise following.pop(0)

        monkeypatch.setattr(recovery, "_enter_next_epoch", enter)


@pytest.mark.parametrize("error", [*OF_THE_USER, *OUT_OF_MEMORY], ids=repr)
def test_an_error_in_a_chosen_plans_first_step_is_answered_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    worker = OnTrial(monkeypatch)
    recovery.recover(worker.runtime, error)
    assert worker.blamed == [error] and not worker.suspected
    assert type(error).__name__ in capsys.readouterr().err, "with its traceback, in the worker's log"
    with pytest.raises(type(error)) as caught:
        recovery.recover(worker.runtime, error)
    assert caught.value is error


@pytest.mark.parametrize("error", [*OF_COMMUNICATORS, EpochBroken("worker 3")], ids=repr)
def test_a_lost_peer_is_not_the_plans_fault(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    worker = OnTrial(monkeypatch)
    recovery.recover(worker.runtime, error)
    assert worker.suspected == [error] and not worker.blamed


@pytest.mark.parametrize("error", [JobEnded(1, "worker 2 failed"), recovery.ContractBroken("state differs")], ids=repr)
def test_what_ends_a_job_ends_it_under_a_chosen_plan_too(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    worker = OnTrial(monkeypatch)
    with pytest.raises(type(error)):
        recovery.recover(worker.runtime, error)
    assert not worker.blamed


def test_who_has_never_been_in_a_plan_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OnTrial(monkeypatch)
    worker.runtime.joining = True
    with pytest.raises(ValueError, match="connection"):
        recovery.recover(worker.runtime, OF_THE_USER[0])


def test_too_little_memory_for_a_chosen_plan_that_others_have_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OnTrial(monkeypatch)
    worker.runtime.control.heard.broken = lambda: True
    recovery.recover(worker.runtime, OUT_OF_MEMORY[0])
    assert not worker.blamed


def test_a_fault_of_the_device_on_the_way_to_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of the broken epoch may fail once the next one has begun, which isn't broken itself."""

    class Died(BaseException):
        pass

    def die(reason: str) -> None:
        raise Died(reason)

    monkeypatch.setattr(device_loss, "die", die)
    worker = runtime(broken=False)
    worker.control.heard.await_broken = lambda timeout_s: False
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError):
        recovery.recover(worker, fault)
    meet(monkeypatch, [fault])
    with pytest.raises(Died):
        recovery.recover(worker, EpochBroken("worker 3"))
    with pytest.raises(Died):  # in the first step after it, which has not been taken yet
        recovery.recover(worker, fault)
