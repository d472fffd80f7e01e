"""What a job's checkpoint said of the learning rate outlives recoveries, in which all is built from the arguments."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from megatron_resihp.integration.counting import restore_counters, snapshot_counters
from megatron_resihp.integration.runtime import Trained
from megatron_resihp.integration.step import COUNTERS_FROM, LOSSES_FROM, note_counters


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


def runtime(max_lr: float, decay_steps: int, beta2: float) -> Any:
    groups = [{"params": [], "betas": (0.9, beta2), "wd_mult": wd_mult} for wd_mult in (0.0, 1.0)]
    working = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=groups))
    stub = SimpleNamespace(is_stub_optimizer=True, optimizer=None)
    optimizer = SimpleNamespace(chained_optimizers=[stub, working])
    args = SimpleNamespace(
        curr_iteration=7, consumed_train_samples=56, skipped_train_samples=0, consumed_valid_samples=0
    )
    trained = Trained([], optimizer, Scheduler(max_lr=max_lr, lr_decay_steps=decay_steps))
    return SimpleNamespace(args=args, trained=trained, totals={}, flops=1.0, is_last_stage=True, groups=groups)


def test_settings_of_a_checkpoint_are_put_into_what_was_built_from_arguments() -> None:
    resumed, anew = runtime(1e-3, 40, 0.95), runtime(5e-3, 100, 0.999)
    resumed.trained.scheduler.num_steps = 56
    told = json.loads(json.dumps(snapshot_counters(resumed)))
    restore_counters(anew, told)
    scheduler = anew.trained.scheduler
    assert (scheduler.max_lr, scheduler.lr_decay_steps, scheduler.num_steps) == (1e-3, 40, 56) and scheduler.stepped
    assert [group["betas"] for group in anew.groups] == [(0.9, 0.95)] * 2
    assert [group["wd_mult"] for group in anew.groups] == [0.0, 1.0], "what differs between groups is as it was built"
    assert (anew.args.iteration, anew.args.consumed_train_samples) == (7, 56)


def test_a_standby_knows_enough_to_go_on_from_if_all_that_work_die() -> None:
    standby, anew = runtime(1e-3, 40, 0.95), runtime(5e-3, 100, 0.999)
    standby.progress = SimpleNamespace(iteration=8, counters={})
    values = torch.zeros(LOSSES_FROM)
    values[COUNTERS_FROM:] = torch.tensor([7.0, 56.0, 0.0, 0.0, 56.0])
    note_counters(standby, values)
    restore_counters(anew, json.loads(json.dumps(standby.progress.counters[8])))
    assert (anew.args.iteration, anew.args.consumed_train_samples, anew.trained.scheduler.num_steps) == (7, 56, 56)
    assert anew.trained.scheduler.max_lr == 1e-3
