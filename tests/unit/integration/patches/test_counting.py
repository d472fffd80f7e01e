# SPDX-License-Identifier: Apache-2.0
"""What a job's checkpoint said of the learning rate outlives recoveries, in which all is built from the arguments; and
what Megatron reckons with afterwards is there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.timers import Timers
from megatron.training import training
from megatron.training.utils import log_utils

from megatron_resihp.control.coordination.record import resolve
from megatron_resihp.integration.patches import counting
from megatron_resihp.integration.patches.counting import (
    INTERVAL,
    count_lost_evaluation,
    note_in_progress_log,
    restore_counters,
    snapshot_counters,
    wrap_flops,
    wrap_theoretical_memory,
    wrap_training_log,
)
from megatron_resihp.integration.progress import Progress, Tally
from megatron_resihp.integration.step.step import COUNTERS_FROM, LOSSES_FROM, note_counters
from megatron_resihp.integration.trained import Trained
from megatron_resihp.plan import ParallelPlan, Replica


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """Megatron's own."""
    timers = Timers(0, "minmax")
    monkeypatch.setattr(counting, "get_timers", lambda: timers)
    return timers


class Scheduler:
    """Megatron's, as far as it says what it is made of."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)
        self.num_steps = 0
        self.stepped = False

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "stepped"}

    def step(self, increment: int) -> None:
        self.stepped = True


KIND: dict[str, Any] = {
    "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
    "max_lr": 1e-3, "min_lr": 0.0,
}  # fmt: skip
BIASES: dict[str, Any] = {"wd_mult": 0.0}
HIDDEN: dict[str, Any] = {"max_lr": 5e-4}
"""Matrices with muP."""
EXPERTS: dict[str, Any] = {"is_expert_parallel": True}
IDENTIFIERS_OF_0_18 = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
IDENTIFIERS_OF_0_19 = ("max_lr", "min_lr", *IDENTIFIERS_OF_0_18)


def adam(*kinds: dict[str, Any], beta2: float = 0.95) -> list[dict[str, Any]]:
    """Parameter groups as Megatron builds them."""
    common = {"lr": 0.5, "weight_decay": 0.5, "step": 3, **KIND, "betas": (0.9, beta2), "eps": 1e-8}
    return [{"params": [], **common, **kind} for kind in kinds]


def muon(momentum: float) -> list[dict[str, Any]]:
    return [{"params": [], **KIND, "momentum": momentum}]


def runtime(max_lr: float, decay_steps: int, *parts: list[dict[str, Any]]) -> Any:
    """A worker whose optimizer has parts with these groups."""
    given = parts or (muon(0.95), adam(BIASES, {}))
    working = [SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=each)) for each in given]
    stub = SimpleNamespace(is_stub_optimizer=True, optimizer=None)
    optimizer = SimpleNamespace(chained_optimizers=[stub, *working])
    args = SimpleNamespace(
        curr_iteration=7,
        consumed_train_samples=56,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        overlap_param_gather_with_optimizer_step=False,
    )
    trained = Trained([], optimizer, Scheduler(max_lr=max_lr, lr_decay_steps=decay_steps))
    view = SimpleNamespace(is_last_stage=True)
    return SimpleNamespace(
        job=SimpleNamespace(args=args, batch_steps=()), held=SimpleNamespace(live=trained),
        tally=Tally(flops=1.0), progress=Progress(),
        view=view, parts=given,
    )  # fmt: skip


def told(counters: dict[str, Any]) -> Any:
    """On their way through the coordinator."""
    return json.loads(json.dumps(counters))


def test_settings_of_a_checkpoint_are_put_into_what_was_built_from_arguments() -> None:
    resumed = runtime(1e-3, 40, muon(0.9), adam(BIASES, {}, beta2=0.95))
    anew = runtime(5e-3, 100, muon(0.95), adam(BIASES, {}, beta2=0.999))
    resumed.held.live.scheduler.num_steps = 56
    restore_counters(anew, told(snapshot_counters(resumed)))
    scheduler = anew.held.live.scheduler
    assert (scheduler.max_lr, scheduler.lr_decay_steps, scheduler.num_steps) == (1e-3, 40, 56) and scheduler.stepped
    assert anew.parts == resumed.parts
    assert (anew.job.args.iteration, anew.job.args.consumed_train_samples) == (7, 56)


def test_each_kind_of_parameter_has_its_own_settings_again_whatever_groups_a_plan_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With muP, hidden matrices have another eps; experts are on some workers only."""
    monkeypatch.setattr(counting, "param_group_identifier_keys", IDENTIFIERS_OF_0_19)
    hidden = HIDDEN | {"eps": 5e-9}
    resumed = runtime(1e-3, 40, adam({}, hidden, BIASES, beta2=0.95))
    anew = runtime(1e-3, 40, adam(HIDDEN | {"eps": 5e-5}, {"eps": 1e-4}, EXPERTS, beta2=0.999))
    restore_counters(anew, told(snapshot_counters(resumed)))
    assert anew.parts == (adam(hidden, {}, beta2=0.95) + adam(EXPERTS, beta2=0.999),)
    # It knows what others are to have whom it tells, as a standby that outlives all that work.
    restore_counters(later := runtime(1e-3, 40, adam({}, BIASES, beta2=0.999)), told(snapshot_counters(anew)))
    assert later.parts == (adam({}, BIASES, beta2=0.95),)


def test_groups_that_megatron_takes_for_equal_keep_what_they_were_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron 0.18 does not tell groups by their rates, and goes by them."""
    monkeypatch.setattr(counting, "param_group_identifier_keys", IDENTIFIERS_OF_0_18)
    before, anew = runtime(1e-3, 40, adam({}, HIDDEN)), runtime(5e-3, 40, adam({"max_lr": 5e-3}, {"max_lr": 3e-3}))
    restore_counters(anew, told(snapshot_counters(before)))
    assert [group["max_lr"] for group in anew.parts[0]] == [1e-3, 5e-4]


def test_no_group_gets_the_settings_of_another_where_plans_have_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of unlike stages has one part for what a uniform one has in two."""
    monkeypatch.setattr(counting, "param_group_identifier_keys", IDENTIFIERS_OF_0_18)
    uniform = runtime(1e-3, 40, adam({}, BIASES, beta2=0.9), adam({"eps": 1e-9}, BIASES, beta2=0.9))
    anew = runtime(1e-3, 40, adam({"eps": 1e-9}, {}, BIASES, beta2=0.999))
    anew.job.args.overlap_param_gather_with_optimizer_step = True
    restore_counters(anew, told(snapshot_counters(uniform)))
    assert anew.parts == ([*adam({"eps": 1e-9}, {}, beta2=0.999), *adam(BIASES, beta2=0.9)],)


def test_what_moves_in_a_step_is_not_put_back() -> None:
    moved = {"lr": 0.1, "weight_decay": 0.2, "step": 9, "params": [torch.ones(1)]}
    before, anew = runtime(1e-3, 40, adam({})), runtime(1e-3, 40, adam(moved))
    restore_counters(anew, told(snapshot_counters(before)))
    assert anew.parts == (adam(moved),)


def test_workers_of_a_stage_report_the_same_but_for_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the coordinator of thousands reads it once."""
    records, times = [], []
    for started in (100.0, 200.0):
        monkeypatch.setattr(training, "_TRAIN_START_TIME", started)
        worker = runtime(1e-3, 40)
        worker.progress.begin(8, snapshot_counters(worker))
        records.append(worker.progress.record(True, 0))
        times.append(worker.progress.times())
    assert records[0] == records[1]
    counted = resolve(records, times=times).counters
    restore_counters(runtime(1e-3, 40), told(counted))
    assert training._TRAIN_START_TIME == 100.0


def test_a_standby_knows_enough_to_go_on_from_if_all_that_work_die() -> None:
    standby, anew = runtime(1e-3, 40, muon(0.9)), runtime(5e-3, 100, muon(0.95))
    standby.progress.iteration = 8
    values = torch.zeros(LOSSES_FROM)
    values[COUNTERS_FROM:] = torch.tensor([7.0, 56.0, 0.0, 0.0, 56.0])
    note_counters(standby, values)
    restore_counters(anew, told(standby.progress.counters[8]))
    args, scheduler = anew.job.args, anew.held.live.scheduler
    assert (args.iteration, args.consumed_train_samples, scheduler.num_steps) == (7, 56, 56)
    assert anew.held.live.scheduler.max_lr == 1e-3 and anew.parts == (muon(0.9),)


def test_megatron_finds_a_start_with_as_many_workers_in_its_progress_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It asserts that where it notes a checkpoint; after a death there are fewer than at the start."""
    args = SimpleNamespace(log_progress=True, save=str(tmp_path), world_size=4)
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(log_utils, "safe_get_rank", lambda: 0)
    for world_size in (4, 3):
        monkeypatch.setattr(log_utils, "safe_get_world_size", lambda: args.world_size)
        args.world_size = world_size
        note_in_progress_log(args)
        _, operations = training.get_start_time_from_progress_log()
        assert operations == 0
    args.log_progress, args.world_size = False, 2
    note_in_progress_log(args)
    with pytest.raises(AssertionError, match="same world_size"):
        training.get_start_time_from_progress_log()


def test_operations_that_are_asked_for_to_be_logged_are_not_counted_again() -> None:
    worker: Any = SimpleNamespace(epoch=0, tally=Tally(flops=100.0))
    operations = wrap_flops(worker, lambda: 7.0)
    log = wrap_training_log(worker, lambda loss_dict, total_loss_dict: operations())
    for iteration in (1, 2):
        operations()
        log({}, {})
        assert worker.tally.flops == 100.0 + 7.0 * iteration


def test_totals_are_those_gone_on_from_until_the_next_line() -> None:
    """Another epoch may break before; this worker may have had the head long ago, or be ahead of what is repeated."""
    worker = runtime(1e-3, 40)
    worker.tally.totals = {"lm loss": torch.tensor([99.0]), "advanced iterations": 9}
    totals = {"lm loss": [5.0], "advanced iterations": 2}
    restore_counters(worker, {**snapshot_counters(worker), "totals": totals})
    assert snapshot_counters(worker)["totals"] == totals


def test_what_megatron_adds_later_is_not_in_totals_of_before() -> None:
    """It does so in place, where experts report."""
    worker: Any = SimpleNamespace(epoch=0, tally=Tally())
    log = wrap_training_log(worker, lambda loss_dict, total_loss_dict: total_loss_dict["z_loss"].add_(1.0))
    found = {"z_loss": torch.tensor(0.0)}
    log({}, found)
    before = worker.tally.totals
    log({}, found)
    assert (float(before["z_loss"]), float(worker.tally.totals["z_loss"])) == (1.0, 2.0)


def test_the_time_of_an_interval_is_gone_on_with(timers: Timers) -> None:
    worker = runtime(1e-3, 40)
    timers(INTERVAL, log_level=0).set_elapsed(7.0)
    counters = told(snapshot_counters(worker))
    timers(INTERVAL).reset()
    restore_counters(worker, counters)
    assert timers(INTERVAL).elapsed(reset=False) == 7.0


def test_totals_are_tensors_again_after_a_recovery_whatever_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts stay numbers, as Megatron has them."""
    real = torch.tensor
    monkeypatch.setattr(counting.torch, "tensor", lambda value, device: real(value))
    carried = {"lm loss": [2.0], "mtp_1 loss": 3.0, "advanced iterations": 1}
    worker: Any = SimpleNamespace(epoch=1, tally=Tally(flops=1.0))
    worker.tally.carried = carried
    seen: dict[str, Any] = {}
    wrap_training_log(worker, lambda loss, totals, **kwargs: seen.update(totals))({}, {})
    assert seen.pop("advanced iterations") == 1
    assert {name: value.item() for name, value in seen.items()} == {"lm loss": 2.0, "mtp_1 loss": 3.0}


def test_the_estimate_of_memory_is_of_the_jobs_replicas() -> None:
    """While Megatron counts as if one of them ran all micro-batches."""
    plan = ParallelPlan(tuple(Replica(((worker,),), (worker, worker + 4)) for worker in range(4)))
    runtime: Any = SimpleNamespace(view=SimpleNamespace(plan=plan))
    args, reported = SimpleNamespace(data_parallel_size=1, hidden_size=8), list[Any]()
    report = wrap_theoretical_memory(runtime, lambda *given: reported.append(given))
    report(args, num_microbatches=8, verbose=True)
    [(seen, micro_batches, verbose)] = reported
    assert (seen.data_parallel_size, seen.hidden_size, micro_batches, verbose) == (4, 8, 2, True)
    assert args.data_parallel_size == 1


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        ({}, 24), ({"iteration": 9}, 0), ({"do_valid": False}, 0), ({"start_eval_at_iter": 20}, 0),
        ({"eval_interval": None}, 0),
    ],
    ids=["due", "not due", "no data", "not yet", "never"],
)  # fmt: skip
def test_later_evaluations_read_what_is_theirs(changed: dict[str, Any], read: int) -> None:
    """The job ended in one, with an emergency checkpoint. No other one reads its samples."""
    args = SimpleNamespace(
        **{
            "iteration": 10, "do_valid": True, "eval_interval": 5, "start_eval_at_iter": None, "eval_iters": 3,
            "eval_global_batch_size": 8, "consumed_valid_samples": 100, **changed,
        }
    )  # fmt: skip
    count_lost_evaluation(args)
    assert args.consumed_valid_samples == 100 + read
