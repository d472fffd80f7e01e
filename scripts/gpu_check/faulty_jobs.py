# SPDX-License-Identifier: Apache-2.0
"""Real jobs with a fault each, against undisturbed jobs with the same flags. Imports the plugin's plans and reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from launching import MODEL, Launched, launch
from references import reference_losses
from setting import Row, Setting

from megatron_resihp.plan import Chunk, ParallelPlan, Replica
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.run.summary import compare

TOLERANCE: Final = 1e-5
"""Tolerance of a loss in fp32, relative to the undisturbed run's."""
BF16_TOLERANCE: Final = 2e-2

FP32: Final[tuple[str, ...]] = ()
BF16: Final = ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce")
TP2: Final = ("--tensor-model-parallel-size", "2")
PP2: Final = ("--pipeline-model-parallel-size", "2")
SEQUENCE: Final = ("--sequence-parallel",)
"""Left out on a device where Apex is not installed: Megatron's local layers need its norms."""


@dataclass(frozen=True)
class Case:
    """A job and its faults.

    Attributes:
        workers: how many ranks share the GPU.
        flags: Megatron's.
        injections: what befalls it.
        strategy: who plans; None: the default.
        plans: asked for at iterations 4, 8 and so on.
        direct: whether results and gradients go between devices under heterogeneous plans.
    """

    workers: int
    flags: tuple[str, ...]
    injections: tuple[str, ...] = ()
    strategy: str | None = None
    plans: tuple[ParallelPlan, ...] = ()
    direct: bool = False


def _replica(micro_batches: range, *stages: tuple[int, ...], ends: tuple[int, ...]) -> Replica:
    layers = tuple(Chunk(stage, first, end) for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False)))
    return Replica(stages, tuple(micro_batches), layers)


LAYERS: Final = MODEL["num-layers"] + 2
"""The embedding and the head count as layers in plans."""
TP2_DP2: Final = ParallelPlan(
    (_replica(range(4), (0, 1), ends=(LAYERS,)), _replica(range(4, 8), (2, 3), ends=(LAYERS,)))
)
UNLIKE: Final = ParallelPlan(
    (_replica(range(5), (0, 1), ends=(LAYERS,)), _replica(range(5, 8), (2,), (3,), ends=(LAYERS // 2, LAYERS)))
)
"""One replica with two tensor-parallel workers, one with two stages, and unequal shares of the batch."""

KILLS: Final[Mapping[str, Case]] = {
    "alone": Case(1, FP32, ("rebuild:0@5", "rebuild:0@8")),
    "grad-sync": Case(2, FP32, ("kill:1@5:grad-sync",)),
    "forward": Case(2, BF16, ("kill:1@5:forward",)),
    "gather": Case(2, BF16, ("kill:1@5:gather",)),
    "gather-in-forward": Case(2, (*BF16, "--overlap-param-gather"), ("kill:1@5:gather",)),
    "stopped": Case(2, FP32, ("stop:1@5:grad-sync",)),
    "backward": Case(4, FP32 + TP2 + SEQUENCE, ("kill:3@5:backward",)),
    "p2p": Case(4, FP32 + PP2, ("kill:2@5:p2p",)),
    "two-deaths": Case(4, FP32, ("kill:3@4:forward", "kill:2@4:recovery-rebuild")),
}
PLANS: Final[Mapping[str, Case]] = {
    "there-and-back": Case(4, FP32 + TP2, plans=(UNLIKE, TP2_DP2)),
    "there-and-back-direct": Case(4, FP32 + TP2, plans=(UNLIKE, TP2_DP2), direct=True),
    "death-direct": Case(4, FP32 + TP2, ("kill:3@6:grad-sync",), plans=(UNLIKE,), direct=True),
    "unlike-after-death": Case(4, FP32 + TP2, ("kill:3@5:forward",), strategy="joint"),
}


def run_kill(setting: Setting, name: str) -> Row:
    """A fault under Megatron's own groups."""
    return run_case(setting, name, KILLS[name])


def run_plan(setting: Setting, name: str) -> Row:
    """A plan that Megatron's own groups can't run."""
    return run_case(setting, name, PLANS[name])


def run_case(setting: Setting, name: str, case: Case) -> Row:
    """A job beside an undisturbed one."""
    flags = case.flags if setting.stand_in or find_spec("apex") else tuple(f for f in case.flags if f not in SEQUENCE)
    with ThreadPoolExecutor(1) as beside:
        undisturbed = beside.submit(reference_losses, setting, case.workers, flags)
        job = launch(setting, name, case.workers, [*flags, *_disturbance(setting, name, case)])
        reference = undisturbed.result()
    difference = compare(job.summary.loss, reference)
    losses = len(job.summary.loss)
    tolerance = BF16_TOLERANCE if "--bf16" in flags else TOLERANCE
    same = difference is not None and difference <= tolerance
    good = job.codes[0] == 0 and same and losses == MODEL["train-iters"] and _was_disturbed(case, job.summary)
    good &= not (case.direct and fell_back(job))
    return {
        "ok": good, "codes": job.codes, "losses": losses, "largest_difference": difference, "tolerance": tolerance,
        "recoveries": len(job.summary.recoveries), **({} if good else {"log": job.tail()}),
    }  # fmt: skip


def _disturbance(setting: Setting, name: str, case: Case) -> list[str]:
    flags = ["--resihp-inject", *case.injections] if case.injections else []
    if case.strategy is not None:
        flags += ["--resihp-strategy", case.strategy]
    if case.direct:
        flags += ["--resihp-carrier", "device"]
    if case.plans:
        flags.append("--resihp-plan")
    for number, plan in enumerate(case.plans):
        path = setting.out / f"{name}-{number}.json"
        path.write_text(json.dumps(plan.to_dict()))
        flags.append(f"{path}@{4 + 4 * number}")
    return flags


def fell_back(job: Launched) -> bool:
    """Whether a worker says that the way between devices has failed."""
    logs = [path.read_text(errors="replace") for path in job.run_dir.rglob("*.log")]
    return any("they can't cross between devices" in log for log in logs)


def _was_disturbed(case: Case, summary: RunSummary) -> bool:
    """Whether the fault took effect; otherwise the job proves nothing."""
    if case.plans and len(summary.plans) <= len(case.plans):
        return False
    return bool(summary.recoveries) or not case.injections
