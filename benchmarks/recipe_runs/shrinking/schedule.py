# SPDX-License-Identifier: Apache-2.0
"""Batches, and the schedule of the job, in its few iterations. Imports `support.batches` of the plugin.

Recipes warm up so slowly that after 12 iterations nothing has been learnt, and any two runs are equal. So the rate is
one at which the job would visibly differ from one without steps.
"""

from typing import Final

from megatron_resihp.integration.support.batches import steps_of
from megatron_resihp.plan.batch_steps import consumed_after, size_at
from recipe_runs.shrinking.draft import Draft
from recipe_runs.shrinking.grid import CONTEXT, PIPELINE, TENSOR

ITERATIONS: Final = 12
HALF: Final = ITERATIONS // 2
DECAY: Final = 2 * ITERATIONS
"""Iterations after which the rate is the least."""
WARM_UP: Final = 2
RATE: Final = 1e-3
SGD_RATE: Final = 0.1
"""Gradient descent without Adam's division learns little from such gradients at the other rate."""
MICRO_BATCHES: Final = 8
"""Of all replicas together."""
LARGEST_MICRO_BATCH: Final = 2
LOSS_SCALE: Final = 4096
"""From fp16's default scale, the first six steps would be skipped."""
TOKENS_SCALE: Final = 16
"""Gradients are sums over all tokens until they are divided."""

RATES: Final = ("--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init", "--muon-lr")
BATCH, BATCHES = "--global-batch-size", "--step-batch-size-schedule"
INTERVALS: Final = ("--save-interval", "--eval-interval", "--save-retain-interval")
GROWN_BY: Final = 4
"""Batches have their last size after so many iterations, or as many as there are sizes: while workers die, and before
the survivors are asked to change their plan, since a change to a plan for smaller batches would not be made."""
ERRORS: Final = "--error-injection-rate"
RARE: Final = 10**9
PIPELINE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def steps_reached(draft: Draft) -> int:
    """How many steps of its schedule of batches a recipe reaches before it ends, which may be all."""
    steps = steps_of(draft.text(BATCHES), draft.number("--seq-length"))
    if not draft.has("--train-samples"):
        return len(steps)
    return sum(start < draft.number("--train-samples") for start, _ in steps)


def shrink_schedule(draft: Draft, reached: int) -> None:
    """`reached`: how many steps of its schedule of batches the recipe reaches."""
    samples = _shrink_batches(draft, reached)
    _shrink_injected_errors(draft)
    _shrink_length(draft, samples)
    _shrink_rate(draft)
    for flag in INTERVALS:
        draft.change(flag, HALF)
    # A save that is due at the same time takes its place.
    draft.change("--non-persistent-save-interval", HALF - 2)
    draft.change("--eval-iters", min(draft.number("--eval-iters"), 1))
    draft.change("--log-interval", 1)
    draft.change("--check-weight-hash-across-dp-replicas-interval", HALF)
    draft.replaced.append(f"schedule -> {ITERATIONS} iterations, rate {_rate(draft)}")
    if draft.has("--fp16") and not draft.has("--loss-scale"):
        scale = TOKENS_SCALE if draft.has("--calculate-per-token-loss") else LOSS_SCALE
        draft.set("--initial-loss-scale", scale)
        draft.replaced.append(f"first loss scale -> {scale}")


def _shrink_batches(draft: Draft, reached: int) -> int:
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
    # Megatron takes no other batch beside these, and would evaluate with one that follows from the number of replicas.
    draft.drop(BATCH)
    draft.set("--eval-global-batch-size", batch)
    steps, each = len(draft.text(BATCHES).split()), max(GROWN_BY // max(reached - 1, 1), 1)
    sizes = [batch * (number + 1) for number in range(steps)]
    starts = [sum(sizes[:number]) * each for number in range(reached)]
    samples = starts[-1] + sizes[reached - 1] * (ITERATIONS - each * (reached - 1))
    starts += range(samples, samples + steps - reached)
    length = draft.number("--seq-length")
    draft.set(BATCHES, " ".join(f"{start * length}:{size}" for start, size in zip(starts, sizes, strict=True)))
    return samples


def _shrink_injected_errors(draft: Draft) -> None:
    """One ends the job, which is what such a recipe is for, in any of its iterations."""
    if draft.number(ERRORS, 0):
        draft.set(ERRORS, RARE)
        draft.replaced.append(f"an error that ends the job -> none ({ERRORS} {RARE})")


def batch_in(draft: Draft, iteration: int) -> int:
    """The global batch of an iteration of what has been shrunk."""
    if not draft.has(BATCHES):
        return draft.number(BATCH)
    steps = tuple(steps_of(draft.text(BATCHES), draft.number("--seq-length")))
    return size_at(steps, consumed_after(steps, iteration - 1))


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
    rate, small = draft.real("--lr"), _rate(draft)
    for flag in RATES:
        draft.change(flag, f"{draft.real(flag) / rate * small:.4g}")
    draft.set("--lr", small)


def _rate(draft: Draft) -> float:
    return SGD_RATE if draft.text("--optimizer") == "sgd" else RATE
