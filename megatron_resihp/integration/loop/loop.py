# SPDX-License-Identifier: Apache-2.0
"""Patch: Megatron's training loop, entered again after each recovery, and its single step.

Replaces training.train, training.train_step, training.checkpoint_and_decide_exit and training.save_checkpoint_and_time.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import training
from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

from megatron_resihp.control.worker.long_saves import waited_for
from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.events.training import Checkpoint, Emulation
from megatron_resihp.integration.loop.course import follow
from megatron_resihp.integration.loop.recovery import TakenIn, leave_if_agreed
from megatron_resihp.integration.loop.telemetry import report_iteration
from megatron_resihp.integration.loop.validation import validate
from megatron_resihp.integration.patches.checkpoints import leave_other_format_behind
from megatron_resihp.integration.patches.counting import (
    batch_grows,
    count_again,
    count_as_one_replica,
    snapshot_counters,
)
from megatron_resihp.integration.patches.data import require_training_data
from megatron_resihp.integration.patches.startup import describe_job
from megatron_resihp.integration.probes.patches import begin_iteration
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.saves.finishing import finish_saves
from megatron_resihp.integration.saves.pending import directory_of_saves
from megatron_resihp.integration.state.digests import record_digests
from megatron_resihp.integration.state.extra_state import extra_digests
from megatron_resihp.integration.step.attention_logits import note_evaluated
from megatron_resihp.integration.step.optimizer_buddies import tell_cost
from megatron_resihp.integration.step.step import agreed_losses, begin_copys_step, is_time_up, tell_metrics
from megatron_resihp.integration.world.group_needs import timeout_of
from megatron_resihp.plan import data_parallel_of
from megatron_resihp.protocol.logs import Place
from megatron_resihp.protocol.messages import TrainingFinished
from megatron_resihp.protocol.records import IterationPhase, Outcome

StepReturn = tuple[dict[str, torch.Tensor], int, bool, bool, int, float | None, float | None, Any]


def wrap_train(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """train() that outlives broken epochs."""

    @functools.wraps(original)
    def train(
        forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, train_data_iterator: Any,
        valid_data_iterator: Any, process_non_loss_data_func: Any, config: Any, checkpointing_context: Any,
        *others: Any, **options: Any,
    ) -> Any:  # fmt: skip
        def enter() -> Any:
            if runtime.joining:
                _join(runtime)
            if not runtime.calls.in_loop:
                _first_epoch(runtime)
            with _finishing(runtime):
                return original(
                    forward_step_func, model, optimizer, opt_param_scheduler, _fresh(train_data_iterator),
                    _fresh(valid_data_iterator), process_non_loss_data_func, get_model_config(model[0]),
                    checkpointing_context, *others, **options,
                )  # fmt: skip

        runtime.calls.checkpointing_context = checkpointing_context
        runtime.calls.made.append(enter)
        returned = follow(runtime)
        args = runtime.job.args
        return returned or (args.iteration, args.num_floating_point_operations_so_far)

    return train


@contextmanager
def _finishing(runtime: Runtime) -> Iterator[None]:
    """Say that training is over when train() returns or exits."""
    try:
        yield
    except SystemExit:
        _finish(runtime)
        runtime.saves.writer.end()
        raise
    _finish(runtime)


def _finish(runtime: Runtime) -> None:
    torch.cuda.synchronize()
    runtime.probes.flush()
    if runtime.pads.padding is not None:
        runtime.control.event(Emulation(ops=runtime.pads.padding.ops, late=runtime.pads.padding.late))
    tell_cost(runtime)
    record_digests(runtime)
    progress = runtime.progress
    stepped = progress.stage is IterationPhase.STEPPED
    runtime.log.send_page(Place(0, progress.iteration if stepped else progress.iteration - 1))
    if stepped:
        # From here on, a worker that recovers finds the counters as they are after the last step.
        runtime.job.args.curr_iteration = progress.iteration
        progress.begin(progress.iteration + 1, snapshot_counters(runtime))
    runtime.control.tell(TrainingFinished(runtime.worker, progress.iteration - 1))


def wrap_evaluation(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """evaluate_and_print_results whose time is noted, and what the next step counts of it."""

    @functools.wraps(original)
    def evaluate_and_print_results(*positional: Any, **options: Any) -> None:
        with runtime.probes.span(SpanKind.EVALUATION):
            original(*positional, **options)
        note_evaluated(runtime)

    return evaluate_and_print_results


def _first_epoch(runtime: Runtime) -> None:
    """Epoch 0 holds when every worker has come this far; from now on deaths are recovered from."""
    require_training_data(runtime)
    count_as_one_replica(runtime)
    runtime.tally.flops = runtime.job.args.num_floating_point_operations_so_far
    runtime.calls.in_loop = True
    # From Go on a death is recovered from, also before train() begins its first step.
    runtime.job.args.curr_iteration = runtime.job.args.iteration
    runtime.progress.begin(runtime.job.args.iteration + 1, snapshot_counters(runtime))
    held, copies = runtime.held, runtime.mode.state.first_copies()
    held.kept, held.experts = copies.kept, copies.experts
    held.extra.current = held.extra.collect(held.live.model, held.shards, after_forward=False)
    digests = runtime.mode.state.digests(held.live) | extra_digests(held.extra.current)
    connections = runtime.communicators.connections
    runtime.control.ready(digests, 0, 0, connections.ports(), copies.keeps_copies)
    connections.narrow(runtime.control.peer_ports)


def _join(runtime: Runtime) -> NoReturn:
    """Go to the others by way of a recovery, which enters train() again.

    Raises:
        TakenIn: a plan has this worker in it.
        JobEnded: none will have.
    """
    count_as_one_replica(runtime)
    # From here on an epoch may break; until then no worker waits for this one.
    raise TakenIn(runtime.control.join(describe_job(runtime.job)))


def _fresh(iterator: Any) -> Any:
    """A new rerun wrapper around the same feed: the old one may hold micro-batches of the broken attempt. Interleaved
    pipelines have a feed for each chunk."""
    if isinstance(iterator, list):
        return [_fresh(each) for each in iterator]
    return None if iterator is None else RerunDataIterator(iterator.iterable)


def wrap_train_step(runtime: Runtime, original: Callable[..., StepReturn]) -> Callable[..., StepReturn]:
    """train_step that keeps the record and can return a step that was applied already."""

    @functools.wraps(original)
    def train_step(*positional: Any, iteration: int, **options: Any) -> StepReturn:
        runtime.control.heard.check()
        runtime.log.send_page(Place(0, iteration))
        runtime.progress.begin(iteration + 1, snapshot_counters(runtime))
        # Only now: what Megatron does after the step before, such as saving, is over and not to be repeated.
        # The plan is for the iteration after one that is applied already.
        grows = runtime.progress.replay is None and batch_grows(runtime)
        if runtime.orders.change or grows:
            finish_saves()
        leave_if_agreed(runtime, grows)
        runtime.scheduled.slowdowns.begin(iteration + 1)
        runtime.scheduled.ask_for_plans(iteration + 1, runtime.view.reports)
        runtime.progress.fed.clear()
        runtime.progress.losses = []
        if runtime.progress.replay is not None:
            outcome, runtime.progress.replay = runtime.progress.replay, None
            return _applied_step(runtime, outcome)
        runtime.orders.validation = None
        runtime.mode.begin_iteration()
        begin_iteration(runtime)
        begin_copys_step(runtime)
        result = original(*positional, iteration=iteration, **options)
        if runtime.progress.stage is IterationPhase.STEPPED:  # Megatron may end the job before the step
            runtime.probes.finish()
            report_iteration(runtime)
            if runtime.orders.validation is not None:
                validate(runtime)
            return (runtime.mode.losses(result[0], runtime.progress.outcomes[iteration + 1]), *result[1:])
        return result

    return train_step


def _applied_step(runtime: Runtime, outcome: Outcome) -> StepReturn:
    """What train_step returned, or would have, for a step that this shard has already taken."""
    runtime.progress.agreed(outcome)
    runtime.progress.stage = IterationPhase.STEPPED
    count_again(runtime, outcome)
    tell_metrics(runtime, outcome)
    # Megatron hands the count from worker to worker in 32 bits.
    zeros = None if outcome.zeros is None else torch.tensor(outcome.zeros, dtype=torch.float32).item()
    return (
        agreed_losses(runtime.view, outcome), int(outcome.skipped), False, False, 0, outcome.grad_norm, zeros,
        outcome.attention_logit or 0,
    )  # fmt: skip


def wrap_checkpoint_and_decide_exit(runtime: Runtime, original: Callable[..., bool]) -> Callable[..., bool]:
    """Saves, and ends the loop in order, on all workers after the same iteration, when it was asked for."""

    @functools.wraps(original)
    def checkpoint_and_decide_exit(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, flops: float, context: Any, iterator: Any
    ) -> bool:
        runtime.reach("between")
        if original(model, optimizer, scheduler, iteration, flops, context, iterator):
            return True
        outcome = runtime.progress.outcomes.get(runtime.progress.iteration)
        if outcome is None or not (outcome.stop or outcome.save):
            return False
        args = runtime.job.args
        if outcome.stop and runtime.view.reports and is_time_up(runtime):
            print(
                f"resihp: ends after iteration {iteration}: --exit-duration-in-mins {runtime.job.minutes}", flush=True
            )
        if args.save and not (args.save_interval and iteration % args.save_interval == 0):
            training.save_checkpoint_and_time(
                iteration, model, optimizer, scheduler, flops, context, train_data_iterator=iterator
            )
        elif runtime.view.reports and not args.save:
            print("resihp: asked for a checkpoint, but there is no --save to say where; none is written", flush=True)
        return outcome.stop

    return checkpoint_and_decide_exit


def wrap_save_checkpoint_and_time(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoints record the true data-parallel size, not the one that the counters see."""

    @functools.wraps(original)
    def save_checkpoint_and_time(
        iteration: int, *positional: Any, non_persistent_ckpt: bool = False, **options: Any
    ) -> None:
        runtime.reach("save")
        if _is_there(runtime, directory_of_saves(runtime.job.args, non_persistent_ckpt), iteration):
            return
        if not runtime.mode.state.is_loadable():
            _put_off(runtime, iteration)
            return
        with runtime.probes.span(SpanKind.SAVE):
            if non_persistent_ckpt or runtime.saves.writer.calls:
                # Megatron removes older checkpoints that are not persistent, and the newest may be under way. It also
                # waits for a busy writer, and does not see that the epoch has broken meanwhile.
                finish_saves()
            with _saving(runtime, iteration, non_persistent_ckpt):
                original(iteration, *positional, non_persistent_ckpt=non_persistent_ckpt, **options)
        if runtime.calls.position > 0:
            # Nothing is trained beside it any more, and what follows closes what the end of a save is written to.
            finish_saves()

    return save_checkpoint_and_time


def _is_there(runtime: Runtime, path: str, iteration: int) -> bool:
    """Whether this checkpoint is whole already. After a recovery whoever logs then may have to tell of it."""
    saves = runtime.saves
    there = saves.is_there(path, iteration)
    if there and iteration == saves.repeated:
        name = get_checkpoint_name(path, iteration, return_base_dir=True)
        runtime.log.note_saved(name, get_checkpoint_tracker_filename(path), path, iteration)
        if runtime.view.reports and not saves.is_known(path, iteration):
            runtime.control.event(Checkpoint(iteration=iteration, path=path))
        saves.made(path, iteration)
    return there


def _put_off(runtime: Runtime, iteration: int) -> None:
    """Save after the first step instead; until then each iteration asks for that anew."""
    if runtime.view.reports and not runtime.saves.lost:
        print(f"resihp: does not save iteration {iteration}, but the next one whose step isn't skipped: "
              "without a step the distributed optimizer has nothing that can be loaded", flush=True)  # fmt: skip
    runtime.saves.lost = True


@contextmanager
def _saving(runtime: Runtime, iteration: int, non_persistent: bool) -> Iterator[None]:
    """Let Megatron save under the plan in force, and say where, once the checkpoint is whole."""
    args, saves, start, calls = runtime.job.args, runtime.saves, time.time(), runtime.saves.writer.calls
    control, most_s = runtime.control, timeout_of(args).total_seconds()
    path = directory_of_saves(args, non_persistent)
    if not non_persistent:
        saves.lost = False
    saves.begun(path, iteration)
    args.data_parallel_size = data_parallel_of(runtime.view.plan)
    try:
        with waited_for(control.heard, control.tell, control.worker, most_s), runtime.mode.state.saving() as used:
            if not args.use_dist_ckpt and runtime.view.reports:
                leave_other_format_behind(path, iteration)
            yield
    finally:
        args.data_parallel_size = 1
        save = Checkpoint(iteration=iteration, path=path, seconds=time.time() - start, format=used)
        if saves.writer.calls > calls:
            saves.under_way.append(save)
    if not args.async_save:
        saves.made(path, iteration)
        if runtime.view.reports:
            runtime.control.event(save)
