# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's counters. They see one replica that runs all micro-batches, whatever the plan.

The LR schedule, consumed samples and logs multiply the local micro-batch count by the data-parallel size. With unlike
counts that gives replicas their own learning rate and cursor. So while train() runs, the data-parallel size that the
counting code sees is 1 and the number of micro-batches is that of the global batch (DESIGN contract 2).
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import (
    reconfigure_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.training import get_timers, training
from megatron.training.utils import append_to_progress_log

from megatron_resihp.integration.patches import prediction_metrics
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.step.loss_scale import move_scale, restore_scale, scale_of
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.plan import data_parallel_of
from megatron_resihp.plan.batch_steps import size_at
from megatron_resihp.protocol.records import Outcome

INTERVAL = "interval-time"
"""Megatron's timer of the iterations whose means its next line tells."""
MOVING: Final = ("params", "step", "lr", "weight_decay")
"""What of a parameter group moves with the shard, or is set anew by the scheduler in each step."""


class OneReplica:
    """Stands for `mpu` in training.py: everything as it is, but a data-parallel size of 1 for counting."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mpu, name)

    def get_data_parallel_world_size(self, *args: Any, **kwargs: Any) -> int:
        return 1


def count_as_one_replica(runtime: Runtime) -> None:
    """Switch the counters over; done once, before the first iteration."""
    args = runtime.job.args
    training.mpu = OneReplica()
    args.data_parallel_size = 1
    grows = bool(runtime.job.batch_steps)
    reconfigure_num_microbatches_calculator(
        rank=args.rank,
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        **({"step_batch_size_schedule": args.step_batch_size_schedule, "seq_length": args.seq_length} if grows else {}),
    )
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def samples_of(runtime: Runtime) -> int:
    """Samples of the iteration that the counters stand before. That may be one that is not computed any more, of the
    batches before those of the plan."""
    args, steps = runtime.job.args, runtime.job.batch_steps
    return size_at(steps, args.consumed_train_samples) if steps else args.global_batch_size


def count_consumed(runtime: Runtime) -> None:
    """What Megatron's loop does after an iteration, where it doesn't run."""
    runtime.job.args.consumed_train_samples += samples_of(runtime)


def count_lost_evaluation(args: Any) -> None:
    """Pass over the samples of an evaluation that was due after this iteration and that nobody will finish. Later ones
    then have theirs."""
    first = getattr(args, "start_eval_at_iter", None) or 0
    if args.do_valid and args.eval_interval and args.iteration % args.eval_interval == 0 and args.iteration >= first:
        args.consumed_valid_samples += args.eval_iters * args.eval_global_batch_size


def batch_grows(runtime: Runtime) -> bool:
    """Whether the iteration that the counters stand before is of larger batches than those of the plan in force."""
    args = runtime.job.args
    if not runtime.job.batch_steps:
        return False
    return samples_of(runtime) != runtime.view.plan.micro_batch_count * args.micro_batch_size


@contextmanager
def sizes_as_they_are() -> Iterator[None]:
    """While it lasts, training.py sees the true data-parallel size: Megatron 0.18 cuts buffers of gradients by it."""
    counted, training.mpu = training.mpu, mpu
    try:
        yield
    finally:
        training.mpu = counted


def snapshot_counters(runtime: Runtime) -> dict[str, Any]:
    """Everything that the loop advances besides the shard's state. Cheap: no device sync, unless the loss scale moves.

    The same on all workers, but that losses and predictions are totalled in the last stage only, and for the time.
    """
    args = runtime.job.args
    totals = {
        name: value
        for name, value in runtime.tally.totals.items()
        if runtime.view.is_last_stage or not isinstance(value, torch.Tensor)
    }
    return {
        "iteration": args.curr_iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "skipped_train_samples": args.skipped_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
        "scheduler_steps": runtime.held.live.scheduler.num_steps,
        "settings": settings_of(runtime.held.live),
        "flops": runtime.tally.flops,
        "totals": totals,
        "predicted": prediction_metrics.running_sums() if runtime.view.is_last_stage else {},
        "interval_s": _seconds_of_interval(),
        "started": training._TRAIN_START_TIME,
    }


def _seconds_of_interval() -> float:
    """What the timer of the interval would show, without waiting for the device."""
    timer = get_timers()(INTERVAL, log_level=0)
    return float(timer._elapsed + (time.time() - timer._start_time if timer._started else 0.0))


def settings_of(trained: Trained) -> dict[str, Any]:
    """What of scheduler and optimizer isn't what they are built with: it has moved since, or may come from the
    checkpoint that the job was resumed from."""
    scheduler = {name: value for name, value in trained.scheduler.state_dict().items() if name != "num_steps"}
    groups = {key: _settings_in(group) for key, group in _groups(trained)} | trained.elsewhere
    return {"scheduler": scheduler, "groups": [*groups.items()], "scale": scale_of(trained.optimizer)}


def _settings_in(group: dict[str, Any]) -> dict[str, Any]:
    """What Megatron takes of a group from a checkpoint: all that is neither a tensor nor moved by the loop."""
    return {name: value for name, value in group.items() if name not in MOVING and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _groups(trained: Trained) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each parameter group with what tells it from others under any plan: the optimizer's part, what Megatron tells
    groups by, and, as that may be equal, its number among equals."""
    found: Counter[tuple[Any, ...]] = Counter()
    for number, part in enumerate(parts_of(trained.optimizer)):
        for group in () if part.is_stub_optimizer else part.optimizer.param_groups:
            kind = number, *map(group.get, param_group_identifier_keys)
            yield (*kind, found[kind]), group
            found[kind] += 1


def _restore_settings(trained: Trained, settings: dict[str, Any], by_kind: bool) -> None:
    """`by_kind`: plans have other parts of the optimizer, as only uniform ones step the first chunk by itself."""
    vars(trained.scheduler).update(settings["scheduler"])
    told = {_with_tuples(key): values for key, values in settings["groups"]}
    groups = [*_groups(trained)]
    if by_kind:
        told = _by_kind_alone(told, groups)
    for key, group in groups:
        values = told.pop(key, None)
        if values is not None:
            for name in _settings_in(group).keys() - values.keys():
                del group[name]
            group.update((name, _with_tuples(value)) for name, value in values.items())
    trained.elsewhere = told
    restore_scale(trained.optimizer, settings["scale"])


def _by_kind_alone(told: dict[tuple[Any, ...], Any], groups: Sequence[tuple[tuple[Any, ...], Any]]) -> dict[Any, Any]:
    """The settings of each group, whatever part of the optimizer it is in. Where several groups of a kind differ, each
    stays as built: another group's settings would be worse."""
    by_kind: dict[tuple[Any, ...], list[Any]] = {}
    for (_, *kind, _), values in told.items():
        by_kind.setdefault(tuple(kind), []).append(values)
    found = {key: by_kind.get(key[1:-1], []) for key, _ in groups}
    return {key: all_[0] for key, all_ in found.items() if all_ and all(each == all_[0] for each in all_)}


def _with_tuples(value: Any) -> Any:
    """Lists are what tuples became on their way through the coordinator."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def restore_counters(runtime: Runtime, counters: dict[str, Any]) -> None:
    """Make train() start where `counters` were taken."""
    args = runtime.job.args
    args.iteration = args.curr_iteration = counters["iteration"]
    args.consumed_train_samples = counters["consumed_train_samples"]
    args.skipped_train_samples = counters["skipped_train_samples"]
    args.consumed_valid_samples = counters["consumed_valid_samples"]
    if runtime.job.batch_steps:
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    args.num_floating_point_operations_so_far = runtime.tally.flops = counters["flops"]
    _restore_settings(runtime.held.live, counters["settings"], args.overlap_param_gather_with_optimizer_step)
    runtime.held.live.scheduler.num_steps = counters["scheduler_steps"]
    runtime.held.live.scheduler.step(increment=0)
    # Also where another epoch breaks before the next line: what is remembered here may be of another iteration.
    runtime.tally.totals = runtime.tally.carried = counters["totals"]
    prediction_metrics.restore_running_sums(counters["predicted"])
    get_timers()(INTERVAL, log_level=0).set_elapsed(counters["interval_s"])
    # The job's, not that of a worker that came later.
    training._TRAIN_START_TIME = counters["started"]


def advance_schedule(runtime: Runtime, outcome: Outcome) -> None:
    """What Megatron's train_step does after the optimizer's step."""
    if not outcome.skipped:
        runtime.held.live.scheduler.step(increment=samples_of(runtime))


def count_again(runtime: Runtime, outcome: Outcome) -> None:
    """What a step that is in the shard's state already does to what `restore_counters` has put back to before it."""
    move_scale(runtime.held.live.optimizer, outcome.skipped)
    advance_schedule(runtime, outcome)


def note_in_progress_log(args: Any) -> None:
    """Megatron reckons throughput from when a job of as many workers was started, and fails where none ever was."""
    if args.log_progress and args.save:
        append_to_progress_log(args.save, "Starting job", barrier=False)


def wrap_training_log(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """Carry the running loss totals over a recovery: they live in a local variable of train()."""

    def training_log(loss_dict: Any, total_loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if runtime.tally.carried is not None:
            for name, value in runtime.tally.carried.items():
                # Lists, and numbers that are no counts, are what tensors became on their way through the coordinator.
                was_tensor = isinstance(value, list | float)
                total_loss_dict[name] = torch.tensor(value, device="cuda") if was_tensor else value
            runtime.tally.carried = None
        if runtime.epoch > 0:
            # The job's first line leaves the totals as they are; the first one after a recovery is not that.
            kwargs["is_first_iteration"] = False
        # It asks for the operations of an iteration that train() has counted.
        flops = runtime.tally.flops
        result = original(loss_dict, total_loss_dict, *args, **kwargs)
        runtime.tally.flops = flops
        # Megatron adds to some of them in place.
        runtime.tally.totals = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in total_loss_dict.items()
        }
        return result

    return training_log


def wrap_params_norm(runtime: Runtime, original: Callable[..., float]) -> Callable[..., float]:
    """The norm of all parameters, after the step."""

    def calc_params_l2_norm(model: Any, *args: Any, **kwargs: Any) -> float:
        return runtime.mode.counts.parameters_norm(lambda chunks: original(chunks, *args, **kwargs))

    return calc_params_l2_norm


def wrap_flops(runtime: Runtime, original: Callable[..., float]) -> Callable[..., float]:
    """Follow the sum of floating-point operations, which is a local variable of train()."""

    def num_floating_point_operations(*args: Any, **kwargs: Any) -> float:
        operations = original(*args, **kwargs)
        runtime.tally.flops += operations
        return operations

    return num_floating_point_operations


def wrap_theoretical_memory(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's estimate, which it prints once, is of the job's replicas and not of one that runs everything."""

    def report_theoretical_memory(args: Any, num_microbatches: int | None = None, verbose: bool = False) -> None:
        replicas = data_parallel_of(runtime.view.plan)
        as_it_is = argparse.Namespace(**vars(args) | {"data_parallel_size": replicas})
        original(as_it_is, num_microbatches and num_microbatches // replicas, verbose)

    return report_theoretical_memory
