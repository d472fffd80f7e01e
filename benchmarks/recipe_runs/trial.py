# SPDX-License-Identifier: Apache-2.0
"""One recipe's trial: its runs, and what their comparison says. May import this package."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from recipe_runs.compare import SKIPPED, Difference, Logged, differences
from recipe_runs.counts import COUNTS, compare_counts
from recipe_runs.plans import Death
from recipe_runs.runs import Run, RunFailed, Runner
from recipe_runs.shrinking.grid import EXPERT, TENSOR
from recipe_runs.shrinking.shrink import Shrunk

FP32: Final = 1e-5
"""Relative; runs in 16 bits may differ by as much as two stock runs with other degrees of tensor parallelism do, and
their numbers of zeros by what chance makes of them besides."""
LOSS: Final = "lm loss"
CONTROL: Final = 100.0
"""Times the tolerance by which a run that learns nothing must differ."""
VISIBLE: Final = 1e-2
"""By how much it must differ at least."""
WITHOUT_STEPS: Final = ("--lr", "0", "--min-lr", "0", "--exit-interval", "5")
"""So few iterations are enough to differ."""
HALF: Final = {"--bf16", "--fp16"}
STAGES_INSIDE: Final = "--use-tp-pp-dp-mapping"
BUCKET: Final = "--ddp-bucket-size"
COUNTED: Final = "--log-num-zeros-in-grad"
CANCELLED: Final = 2.0
"""Zeros by which two runs in fp32 may differ. In so many elements and steps the terms of one cancel exactly now and
then: in about every tenth run, by the 24 bits of a term."""
NORMS: Final = ("params-norm", "params-norm vs samples")
DECOUPLED: Final = ("--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init", "--muon-lr")

EQUAL, UNEQUAL, FAILED, NO_CONTROL = "equal", "unequal", "failed", "no control"


@dataclass(frozen=True)
class Verdict:
    """What became of a recipe.

    Attributes:
        outcome: equal, unequal, failed (why is in `reason`), or no control: the comparison could not have failed.
        death: what happened to the job.
        unequal: the tags that differ by more than they may, with how much they may.
        loss: the largest relative difference of the loss, `tolerance`: what it may be, `control`: that of a run that
            learns nothing.
        seconds: of each run.
    """

    outcome: str
    reason: str = ""
    death: str = ""
    unequal: Sequence[tuple[Difference, float]] = ()
    loss: float = 0.0
    tolerance: float = FP32
    control: float = 0.0
    seconds: Mapping[str, float] | None = None


class Trial:
    """Runs a recipe in every way that its verdict needs."""

    def __init__(self, runner: Runner, shrunk: Shrunk, random: Random) -> None:
        self._runner = runner
        self._shrunk = shrunk
        self._random = random
        self._seconds: dict[str, float] = {}

    def verdict(self) -> Verdict:
        try:
            stock = self._note("stock", self._runner.stock(self._shrunk, "stock"))
            other = self._other()
            still = self._note("without steps", self._runner.stock(self._shrunk, "still", *self._without_steps()))
            run, death = self._runner.through_death(self._shrunk, self._random)
            self._note("death", run)
            verdict = judge(stock, run.logged, still, other, death, self._seconds)
        except RunFailed as failure:
            return Verdict(FAILED, str(failure), seconds=self._seconds)
        if verdict.outcome != UNEQUAL:
            return verdict
        try:
            more = (self._unshared(), self._alone())
        except RunFailed:  # stock Megatron can't tell more
            return verdict
        return judge(stock, run.logged, still, other, death, self._seconds, *more)

    def _note(self, name: str, run: Run) -> Logged:
        self._seconds[name] = run.seconds
        return run.logged

    def _other(self) -> Logged | None:
        """Stock Megatron with another degree of tensor parallelism, in 16 bits."""
        if not HALF & set(self._shrunk.words):
            return None
        return self._note("other degree", self._runner.stock(self._in_any_degree(), "other", *self._other_degree()))

    def _other_degree(self) -> list[str]:
        words = self._shrunk.words
        degree = int(words[words.index(TENSOR) + 1]) if TENSOR in words else 1
        if degree > 1:
            return [TENSOR, "1"]
        # Mixtures of experts are only cut together with the sequence.
        return [TENSOR, "2", *(["--sequence-parallel"] if "--num-experts" in words else [])]

    def _unshared(self) -> Logged | None:
        """Stock Megatron with all experts on each worker, in 16 bits. Its experts begin with other weights, so only its
        numbers of zeros are of use."""
        words = self._shrunk.words
        shared = EXPERT in words and words[words.index(EXPERT) + 1] != "1"
        if not shared or COUNTED not in words or not HALF & set(words):
            return None
        return self._note("experts unshared", self._runner.stock(self._in_any_degree(), "unshared", EXPERT, "1"))

    def _alone(self) -> Logged | None:
        """Stock Megatron with one of the two replicas, where each has fp32 copies of some parameters only. A worker's
        norm of parameters is of its copies, and else of 16 bits, so that it follows from the number of replicas."""
        words = self._shrunk.words
        if not {"--log-params-norm", "--use-distributed-optimizer", "muon"} <= set(words):
            return None
        half = replace(self._shrunk, workers=self._shrunk.workers // 2)
        return self._note("alone", self._runner.stock(half, "alone"))

    def _in_any_degree(self) -> Shrunk:
        """The recipe with Megatron's usual order of ranks and size of buckets, which change no sum. The other order
        admits few degrees of experts; and a parameter that another degree makes larger than a bucket leaves one empty,
        which Megatron refuses."""
        words = [word for word in self._shrunk.words if word != STAGES_INSIDE]
        if BUCKET in words:
            del words[words.index(BUCKET) : words.index(BUCKET) + 2]
        return replace(self._shrunk, words=tuple(words))

    def _without_steps(self) -> list[str]:
        decoupled = [flag for flag in DECOUPLED if flag in self._shrunk.words]
        return [*WITHOUT_STEPS, *(word for flag in decoupled for word in (flag, "0"))]


def judge(
    stock: Logged, run: Logged, still: Logged, other: Logged | None, death: Death, seconds: Mapping[str, float],
    unshared: Logged | None = None, alone: Logged | None = None,
) -> Verdict:  # fmt: skip
    """Pure: the verdict on what the runs have logged.

    Two degrees of tensor parallelism may differ by so much in 16 bits that no control would tell it from learning
    nothing. So the loss may differ by the control's hundredth at most, too.

    Args:
        other: of stock Megatron with another degree; None: not in 16 bits.
        unshared: of stock Megatron where no workers share experts; None: it isn't needed, or tells nothing.
        alone: of one replica of stock Megatron; likewise.
    """
    found = compare(stock, run, other, unshared, alone)
    both = stock.keys() & still.keys()
    control = differences({key: stock[key] for key in both}, still)[LOSS].relative
    loss, tolerance = found[LOSS]
    tolerance = max(min(tolerance, control / CONTROL), FP32)
    found[LOSS] = loss, tolerance
    unequal = [(difference, allowed) for difference, allowed in found.values() if not difference.relative <= allowed]
    outcome, reason = UNEQUAL if unequal else EQUAL, ""
    skipped = sum(values != {0.0} for (tag, _), values in stock.items() if tag == SKIPPED)
    if skipped or control < VISIBLE:
        outcome = NO_CONTROL
        reason = f"without steps the loss differs by {control:.2g}, less than {VISIBLE:g}; steps skipped: {skipped}"
    return Verdict(outcome, reason, str(death), unequal, loss.relative, tolerance, control, seconds)


def compare(
    stock: Logged, run: Logged, other: Logged | None, unshared: Logged | None = None, alone: Logged | None = None
) -> dict[str, tuple[Difference, float]]:
    """The largest difference under each tag, and what it may be."""
    found = differences(stock, run)
    if other is None:
        return {tag: (each, _cancelled(each) if tag in COUNTS else FP32) for tag, each in found.items()}
    stocks = {tag: each.relative for tag, each in differences(stock, other).items() if each.relative < math.inf}
    lone = {} if alone is None else differences(stock, alone)
    norms = {tag: lone[tag].relative for tag in NORMS if tag in lone and lone[tag].relative < math.inf}
    compared = {tag: (each, max(stocks.get(tag, 0.0), norms.get(tag, 0.0), FP32)) for tag, each in found.items()}
    others = [each for each in (other, unshared) if each is not None]
    for tag in compared.keys() & set(COUNTS):
        compared |= {each.tag: (each, allowed) for each, allowed in compare_counts(tag, stock, run, others)}
    return compared


def _cancelled(count: Difference) -> float:
    """By how much two counts of zeros may differ in fp32, relatively."""
    return CANCELLED / max(*count.one, *count.other, CANCELLED)
