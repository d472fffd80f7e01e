# SPDX-License-Identifier: Apache-2.0
"""Patch: the optimizer step. One reduction over all workers decides it; from then on nothing communicates.

Replaces `step` of the optimizer object by `agreed_step`. DESIGN contract 3.
"""

import argparse
import math
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.training import training

from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.events.training import Samples
from megatron_resihp.integration.patches import prediction_metrics
from megatron_resihp.integration.patches.counting import samples_of, settings_of
from megatron_resihp.integration.patches.experts import expert_metrics
from megatron_resihp.integration.progress import LOSS_SLOTS
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.expert_biases import change_biases
from megatron_resihp.integration.step.attention_logits import clip_weights, logged_maximum, share_logits
from megatron_resihp.integration.step.extra_states import share_extra_state
from megatron_resihp.integration.step.loss_scale import (
    divide_gradients,
    inverse_scale,
    move_scale,
    ready_gradients,
    scales_losses,
)
from megatron_resihp.integration.trained import parts_of
from megatron_resihp.integration.world.view import View
from megatron_resihp.protocol.notices import PlanChange, ValidationOrder
from megatron_resihp.protocol.records import IterationPhase, Outcome

SHARED_COUNTERS = (
    "iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "scheduler_steps",
)  # fmt: skip
VALIDATION, CHANGE = 2, 3
SAVE, SAVERS, LOST = 4, 5, 6
ZEROS = 7
COUNTERS_FROM = 8
LOSSES_FROM = COUNTERS_FROM + len(SHARED_COUNTERS)
DOCUMENTS_FROM = LOSSES_FROM + 2 * LOSS_SLOTS
EXPERTS_FROM = DOCUMENTS_FROM + 2
"""From here on as many numbers as the job's flags ask for."""

StepResult = tuple[bool, float | None, int | None]


def install_step(runtime: Runtime) -> None:
    """Make the optimizer's step the agreed one, in which no timer waits for others: a step that was begun is taken."""
    runtime.held.live.optimizer.step = lambda: agreed_step(runtime)
    for part in parts_of(runtime.held.live.optimizer):
        part.config.barrier_with_L1_time = False


def agreed_step(runtime: Runtime) -> StepResult:
    """What replaces MegatronOptimizer.step; returns (successful, gradient norm, zeros in gradients)."""
    runtime.mode.share_gradients()
    share_extra_state(runtime)
    see_reduced(runtime)
    runtime.probes.synchronized()
    _record_samples(runtime)
    runtime.reach("norm")
    norm_squared = local_norm_squared(runtime)
    zeros = runtime.mode.counts.zeros() if runtime.job.args.log_num_zeros_in_grad else 0
    # No step counts before the log has the one before.
    runtime.control.settle_events()
    with runtime.probes.span(SpanKind.AGREEMENT):
        outcome = agree(runtime, norm_squared, zeros)
    runtime.progress.agreed(outcome)
    runtime.on_trial = False
    tell_metrics(runtime, outcome)
    runtime.reach("step")
    with runtime.probes.marked_span(SpanKind.OPTIMIZER):
        take_step(runtime, outcome)
        if not outcome.skipped:
            runtime.mode.after_step()
    # The device has work now, and no other worker waits for this one.
    runtime.probes.flush()
    return not outcome.skipped, outcome.grad_norm, outcome.zeros


def see_reduced(runtime: Runtime) -> None:
    """Have the host see every gradient collective of this worker complete: COMPUTE to REDUCED. Standbys may get theirs
    from device to device, too.

    Raises:
        EpochBroken, JobEnded or DistError: what has come may be garbage, as an aborted collective leaves it.
    """
    with runtime.communicators.waiter.noted():
        torch.cuda.synchronize()
    # NCCL tells of its errors in the background, while the device goes on.
    try:
        runtime.communicators.connections.check()
    except dist.DistError:
        runtime.mode.nccl_failed()
        raise
    runtime.control.heard.check()
    share_logits(runtime)
    runtime.progress.stage = IterationPhase.REDUCED


def _record_samples(runtime: Runtime) -> None:
    """Say what was fed before the step can be agreed on: a step that counts is never without its samples in the log."""
    progress, view = runtime.progress, runtime.view
    if runtime.job.config.resihp_record_samples and progress.fed and view.is_first_stage and view.feeds_first:
        counted = progress.fed[: len(view.counted) * runtime.job.args.micro_batch_size]
        runtime.control.event(Samples(
            epoch=runtime.epoch, iteration=progress.iteration, replica=view.replica,
            samples=tuple((first, last) for first, last in _ranges(counted)), micro_batches=view.counted,
            consumed=runtime.job.args.consumed_train_samples,
        ))  # fmt: skip


def _ranges(numbers: list[int]) -> list[list[int]]:
    """[3, 4, 5, 9] as [[3, 5], [9, 9]]; keeps the order."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def local_norm_squared(runtime: Runtime) -> float:
    """Sum of squares over the gradients that this worker owns (shared and TP-duplicate ones once)."""
    optimizer = runtime.held.live.optimizer
    ready_gradients(optimizer)
    inverse = inverse_scale(runtime.mode.averaging, optimizer)
    share = 1.0 if inverse is None else float(inverse)
    return runtime.mode.counts.norm_squared() * share * share


def agree(runtime: Runtime, norm_squared: float, zeros: int = 0) -> Outcome:
    """The one reduction over all workers, state-holding standbys included.

    Raises:
        EpochBroken or an error of gloo: a worker died; none of the others, or all of them, may have agreed.
        RuntimeError: on all workers alike, the norm is no finite number though Megatron was to check for that.
    """
    validation, change = runtime.control.heard.validation.of_epoch(runtime.control.epoch), runtime.change
    values = _brought(runtime, norm_squared, validation, change)
    values[ZEROS] = zeros
    runtime.mode.everybody.sum(values)
    # What has overflowed, before or in the sums, makes them not finite.
    skipped = scales_losses(runtime.held.live.optimizer) and not math.isfinite(values[0])
    if not skipped:
        _check_norm(runtime, float(values[0]))
    if _heard_by_all(runtime, validation, values[VALIDATION]):
        runtime.orders.validation = validation
        runtime.control.heard.validation.drop(validation)
    if _heard_by_all(runtime, change, values[CHANGE]):
        runtime.orders.change = True
        runtime.control.heard.change.drop(change)
    runtime.progress.documents = (float(values[DOCUMENTS_FROM]), float(values[DOCUMENTS_FROM + 1]))
    if not runtime.view.works:
        note_counters(runtime, values)
    losses = tuple((total, tokens) for total, tokens in values[LOSSES_FROM:DOCUMENTS_FROM].view(LOSS_SLOTS, 2).tolist())
    norm, stop = None if skipped else math.sqrt(float(values[0])), bool(values[1] > 0)
    save = _to_save(runtime, values)
    predictions_from = EXPERTS_FROM + _width_of_experts(runtime)
    loads_from = _loads_from(runtime)
    runtime.loads.agreed(values[loads_from:])
    counted = runtime.job.args.log_num_zeros_in_grad and not skipped
    counted_zeros = round(float(values[ZEROS])) if counted else None
    return Outcome(
        runtime.epoch, norm, losses, runtime.progress.loss_names, stop, skipped,
        tuple(values[EXPERTS_FROM:predictions_from].tolist()), save, counted_zeros,
        tuple(values[predictions_from:loads_from].tolist()), logged_maximum(runtime),
    )  # fmt: skip


def tell_metrics(runtime: Runtime, outcome: Outcome) -> None:
    """Let Megatron log what was agreed on of experts' balance and of predictions of further tokens."""
    args = runtime.job.args
    micro_batches = samples_of(runtime) // args.micro_batch_size
    if runtime.view.works and outcome.experts:
        expert_metrics.tell_sums(outcome.experts, micro_batches, _layers(args))
    if runtime.view.works and runtime.view.is_last_stage and outcome.predictions:
        prediction_metrics.tell_sums(outcome.predictions, micro_batches)


def _brought(
    runtime: Runtime, norm_squared: float, validation: ValidationOrder | None, change: PlanChange | None
) -> torch.Tensor:
    """What this worker adds to the reduction."""
    args = runtime.job.args
    depths, predictions_from = args.mtp_num_layers, EXPERTS_FROM + _width_of_experts(runtime)
    loads_from = _loads_from(runtime)
    values = torch.zeros(loads_from + runtime.loads.width(runtime.progress.iteration), dtype=torch.float64)
    values[0] = norm_squared
    values[1] = 1.0 if runtime.control.heard.stop_signal or is_time_up(runtime) else 0.0
    values[VALIDATION] = _number(validation)
    values[CHANGE] = _number(change)
    if runtime.control.heard.to_save > runtime.orders.saves:
        values[SAVE], values[SAVERS] = runtime.control.heard.to_save, 1.0
    values[LOST] = 1.0 if runtime.saves.is_wanted and runtime.view.works else 0.0
    if runtime.view.reports:
        counters = runtime.progress.counters[runtime.progress.iteration]
        values[COUNTERS_FROM:LOSSES_FROM] = torch.tensor([counters[name] for name in SHARED_COUNTERS])
    if runtime.progress.losses:
        runtime.progress.loss_names = _names_to_agree_on(runtime)
    if not runtime.view.works:
        return values
    if runtime.progress.losses and runtime.view.is_last_stage and runtime.view.tp_rank == 0:
        _add_losses(runtime, values)
        if depths:
            values[predictions_from:loads_from] = torch.tensor(prediction_metrics.recorded(depths))
    if args.num_experts:
        sharers = mpu.get_tensor_model_parallel_world_size() * runtime.view.plan.context_parallel
        values[EXPERTS_FROM:predictions_from] = torch.tensor(expert_metrics.recorded(sharers, _logged_layers(args)))
    if values[loads_from:].numel():
        values[loads_from:] = runtime.loads.counted()
    if runtime.mode.seen_documents is not None:
        values[DOCUMENTS_FROM:EXPERTS_FROM] = runtime.mode.seen_documents
    return values


def _width_of_experts(runtime: Runtime) -> int:
    args = runtime.job.args
    return expert_metrics.width(_logged_layers(args)) if args.num_experts else 0


def _loads_from(runtime: Runtime) -> int:
    """Where counts of experts' tokens begin, last of all, in an iteration that has them."""
    return EXPERTS_FROM + _width_of_experts(runtime) + prediction_metrics.width(runtime.job.args.mtp_num_layers)


def _logged_layers(args: argparse.Namespace) -> int:
    """How many layers' own sums are logged."""
    return _layers(args) if args.moe_per_layer_logging else 0


def _layers(args: argparse.Namespace) -> int:
    return args.num_layers + (args.mtp_num_layers or 0)


def _check_norm(runtime: Runtime, norm_squared: float) -> None:
    """Megatron checks each worker's own gradients; this is for what only their sum shows, on standbys too."""
    if runtime.job.args.check_for_nan_in_loss_and_grad and not math.isfinite(norm_squared):
        raise RuntimeError(
            f"Worker {runtime.worker}, iteration {runtime.progress.iteration}: Unexpected result {norm_squared} "
            "(message='found NaN or Inf in the squared norm of all gradients')"
        )


def is_time_up(runtime: Runtime) -> bool:
    """Whether the job has run for as long as it may."""
    most = runtime.job.minutes
    return most is not None and time.time() - training._TRAIN_START_TIME > 60 * most


def _number(order: ValidationOrder | PlanChange | None) -> float:
    return float(order.number) if order is not None else 0.0


def _heard_by_all(runtime: Runtime, order: ValidationOrder | PlanChange | None, total: torch.Tensor) -> bool:
    """Whether all workers have heard of an order; all see that in the same step."""
    return order is not None and float(total) == _number(order) * len(runtime.mode.everybody.workers)


def _to_save(runtime: Runtime, values: torch.Tensor) -> bool:
    """Whether a worker has heard that a checkpoint is wanted, or has lost one; one that hears later saves no second."""
    if values[LOST] > 0:
        runtime.saves.lost = False
    if values[SAVERS] == 0:
        return bool(values[LOST] > 0)
    runtime.orders.saves = max(runtime.orders.saves, round(float(values[SAVE] / values[SAVERS])))
    return True


def _names_to_agree_on(runtime: Runtime) -> tuple[str, ...]:
    """Those of the losses for which there is room. Of others one worker tells, in its first step."""
    names = sorted(runtime.progress.losses[0])
    if names[LOSS_SLOTS:] and runtime.view.reports and not runtime.progress.loss_names:
        print(
            f"resihp: the loss function reports {len(names)} losses, and workers agree on {LOSS_SLOTS} by name. Where "
            "Megatron logs what they agreed on, as under plans of unlike stages and in steps that are repeated after "
            f"a failure, it does not log: {', '.join(names[LOSS_SLOTS:])}", file=sys.stderr, flush=True,
        )  # fmt: skip
    return tuple(names[:LOSS_SLOTS])


def _add_losses(runtime: Runtime, values: torch.Tensor) -> None:
    for slot, name in enumerate(runtime.progress.loss_names):
        reported = torch.stack([losses[name].view(-1).double() for losses in runtime.progress.losses]).sum(dim=0).cpu()
        if reported.numel() == 1:  # a user's loss function may report a mean instead of (sum, tokens)
            reported = torch.tensor([float(reported), float(len(runtime.progress.losses))])
            reported *= runtime.mode.averaging.weight
        values[LOSSES_FROM + 2 * slot : LOSSES_FROM + 2 * slot + 2] += reported


def note_counters(runtime: Runtime, values: torch.Tensor) -> None:
    """A standby does not run Megatron's loop; it learns the counters from workers that do, to take over if they die."""
    numbers = map(int, values[COUNTERS_FROM:LOSSES_FROM].tolist())
    shared = dict(zip(SHARED_COUNTERS, numbers, strict=True))
    runtime.progress.counters[runtime.progress.iteration] = {
        **shared, "settings": settings_of(runtime.held.live), "flops": 0.0, "totals": {},
        "predicted": {}, "interval_s": 0.0, "started": training._TRAIN_START_TIME,
    }  # fmt: skip


def take_step(runtime: Runtime, outcome: Outcome) -> None:
    """AGREED to STEPPED: clip with the agreed norm and step, if the step isn't skipped. Communicates nothing."""
    if runtime.held.live.lacks_gradients:
        raise RuntimeError("a step is to be taken whose gradients were freed: the committed one had been taken before")
    optimizer, kept = runtime.held.live.optimizer, runtime.held.kept
    if not outcome.skipped:
        inverse = inverse_scale(runtime.mode.averaging, optimizer)
        copy = runtime.held.copy
        if copy is not None:
            assert outcome.grad_norm is not None
            device = torch.device("cuda", torch.cuda.current_device())
            # A number: the copy's own stream does not wait for what this one computes.
            share = None if inverse is None else float(inverse)
            copy.prepare_step(optimizer, outcome.grad_norm, share, device)
        # Who holds nothing may still have the objects of an earlier epoch.
        if bool(runtime.held.shards) if kept is None else kept.owns:
            _step_own(runtime, optimizer, outcome, inverse)
    # Also in a step that is skipped: its tokens and logits were counted, as in Megatron.
    if runtime.held.shards:
        change_biases(runtime.held.live.model)
    clip_weights(runtime)
    move_scale(optimizer, outcome.skipped)
    runtime.held.extra.adopt()
    runtime.progress.stage = IterationPhase.STEPPED


def begin_copys_step(runtime: Runtime) -> None:
    """Called where the host will wait for its device: beside the own step both would take longer, and others wait."""
    if runtime.held.copy is not None:
        runtime.held.copy.begin_step()


def _step_own(runtime: Runtime, optimizer: Any, outcome: Outcome, inverse: torch.Tensor | None) -> None:
    ready_gradients(optimizer)
    for part in parts_of(optimizer):
        divide_gradients(part, inverse)
        parameters = part.get_parameters()
        if part.config.clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, outcome.grad_norm)
    runtime.mode.step(optimizer)


def agreed_losses(view: View, outcome: Outcome) -> dict[str, torch.Tensor]:
    """The mean losses of an iteration as train_step returns them: on the last stage only."""
    if not view.is_last_stage:
        return {}
    return {name: torch.tensor(mean, dtype=torch.float, device="cuda") for name, mean in outcome.means.items()}
