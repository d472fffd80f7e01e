# SPDX-License-Identifier: Apache-2.0
"""Batches, and the schedule of the job, in its few iterations. Imports the standard library only.

Recipes warm up so slowly that after 12 iterations nothing has been learnt, and any two runs are equal. So the rate is
one at which the job would visibly differ from one without steps.
"""

from typing import Final

from recipe_runs.shrinking.draft import Draft
from recipe_runs.shrinking.grid import CONTEXT, PIPELINE, TENSOR

ITERATIONS: Final = 12
HALF: Final = ITERATIONS // 2
DECAY: Final = 2 * ITERATIONS
"""Iterations after which the rate is the least."""
WARM_UP: Final = 2
RATE: Final = 1e-3
MICRO_BATCHES: Final = 8
"""Of all replicas together."""
LARGEST_MICRO_BATCH: Final = 2
LOSS_SCALE: Final = 4096
"""From fp16's default scale, the first six steps would be skipped."""

RATES: Final = ("--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init", "--muon-lr")
BATCH, BATCHES = "--global-batch-size", "--step-batch-size-schedule"
INTERVALS: Final = ("--save-interval", "--eval-interval", "--save-retain-interval")
PIPELINE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def shrink_schedule(draft: Draft) -> None:
    samples = _shrink_batches(draft)
    _shrink_length(draft, samples)
    _shrink_rate(draft)
    for flag in INTERVALS:
        draft.change(flag, HALF)
    # A save that is due at the same time takes its place.
    draft.change("--non-persistent-save-interval", HALF - 2)
    draft.change("--eval-iters", min(draft.number("--eval-iters"), 1))
    draft.change("--log-interval", 1)
    draft.change("--check-weight-hash-across-dp-replicas-interval", HALF)
    draft.replaced.append(f"schedule -> {ITERATIONS} iterations, rate {RATE}")
    if draft.has("--fp16") and not draft.has("--loss-scale"):
        draft.set("--initial-loss-scale", LOSS_SCALE)
        draft.replaced.append(f"first loss scale -> {LOSS_SCALE}")


def _shrink_batches(draft: Draft) -> int:
    """Returns how many samples all iterations have."""
    micro = min(draft.number("--micro-batch-size"), LARGEST_MICRO_BATCH)
    draft.set("--micro-batch-size", micro)
    replicas = draft.workers // (draft.number(TENSOR) * draft.number(PIPELINE) * draft.number(CONTEXT))
    batch = micro * max(MICRO_BATCHES, replicas * draft.number(PIPELINE_GROUP, 0))
    draft.change("--eval-global-batch-size", batch)
    draft.change("--eval-micro-batch-size", micro)
    if not draft.has(BATCHES):
        draft.set(BATCH, batch)
        return batch * ITERATIONS
    # Megatron takes no other batch beside these.
    draft.drop(BATCH)
    steps = len(draft.text(BATCHES).split())
    each = ITERATIONS // steps
    sizes = [batch * (number + 1) for number in range(steps)]
    starts = [sum(sizes[:number]) * each * draft.number("--seq-length") for number in range(steps)]
    draft.set(BATCHES, " ".join(f"{start}:{size}" for start, size in zip(starts, sizes, strict=True)))
    return sum(sizes) * each + sizes[-1] * (ITERATIONS - each * steps)


def first_batch(draft: Draft) -> int:
    """The global batch of the first iteration of what has been shrunk."""
    if draft.has(BATCHES):
        return int(draft.text(BATCHES).split()[0].partition(":")[2])
    return draft.number(BATCH)


def _shrink_length(draft: Draft, samples: int) -> None:
    if draft.has("--train-samples"):
        draft.set("--train-samples", samples)
    else:
        draft.set("--train-iters", ITERATIONS)
    draft.change("--exit-interval", ITERATIONS)
    draft.change("--lr-decay-iters", DECAY)
    draft.change("--lr-decay-samples", samples * DECAY // ITERATIONS)
    draft.change("--lr-warmup-iters", min(draft.number("--lr-warmup-iters"), WARM_UP))
    warm_up = samples * WARM_UP // ITERATIONS
    draft.change("--lr-warmup-samples", min(draft.number("--lr-warmup-samples"), warm_up))


def _shrink_rate(draft: Draft) -> None:
    rate = draft.real("--lr")
    for flag in RATES:
        draft.change(flag, f"{draft.real(flag) / rate * RATE:.4g}")
    draft.set("--lr", RATE)
