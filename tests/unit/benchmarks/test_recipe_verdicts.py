# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/recipes.py` says of runs: which are equal, which comparisons don't count, and what a file keeps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "integration"))

from recipe_runs.compare import Logged, differences, read_logged
from recipe_runs.plans import (
    HOLD_AT,
    POINTS,
    Death,
    draw_death,
    sharing_replicas,
    unlike_replicas,
)
from recipe_runs.results import Line, Results, lines_of, summary
from recipe_runs.runs import plan_of
from recipe_runs.shrinking.shrink import Shrunk
from recipe_runs.trial import EQUAL, FAILED, FP32, NO_CONTROL, UNEQUAL, Verdict, judge

from megatron_resihp.plan.rules import Sharing

DEATH = Death(1, 2, "forward")


def logged(loss: float, **others: float) -> Logged:
    tags = {"lm loss": loss, "skipped": 0.0, **others}
    return {(tag, step): frozenset([value]) for tag, value in tags.items() for step in (1, 2)}


def outcome(stock: Logged, run: Logged, still: Logged, other: Logged | None = None) -> str:
    return judge(stock, run, still, other, DEATH, {}).outcome


def test_runs_are_equal_within_the_tolerance_of_each_number() -> None:
    still = logged(4.0)
    assert outcome(logged(3.0, norm=1.0), logged(3.0 + 1e-5, norm=1.0), logged(4.0, norm=1.0)) == EQUAL
    assert outcome(logged(3.0), logged(3.0 + 4e-5), still) == UNEQUAL
    assert outcome(logged(3.0, norm=1.0), logged(3.0, norm=1.1), still) == UNEQUAL
    others = logged(3.0, norm=1.2)
    assert outcome(logged(3.0, norm=1.0), logged(3.0, norm=1.1), still, others) == EQUAL, "as two stock runs in bf16"
    assert outcome(logged(3.0), logged(3.1), still, logged(6.0)) == UNEQUAL, "the control differs by 0.25"
    assert outcome(logged(3.0), logged(3.003), still, logged(6.0)) == EQUAL
    assert outcome(logged(3.0, norm=1.0), logged(3.0), still) == UNEQUAL, "a number is missing"
    assert outcome(logged(3.0), logged(math.nan), still) == UNEQUAL


def zeros(*counts: float, loss: float = 3.0) -> Logged:
    """A run with so many zeros in its steps."""
    tags: dict[tuple[str, int], frozenset[float]] = {}
    for step, count in enumerate(counts, 1):
        tags |= {("lm loss", step): frozenset([loss]), ("num-zeros", step): frozenset([count])}
    return tags


def zeros_outcome(stock: Sequence[float], run: Sequence[float], other: Sequence[float] | None) -> str:
    others = None if other is None else zeros(*other)
    return outcome(zeros(*stock), zeros(*run), zeros(*stock, loss=4.0), others)


@pytest.mark.parametrize("pair", [(21, 8), (18, 8), (13, 6), (7, 14), (69, 80), (17, 4), (0, 0), (0, 9)])
def test_zeros_in_16_bits_differ_by_chance(pair: tuple[int, int]) -> None:
    """As many of tens of thousands of elements were found in runs that train the same."""
    assert zeros_outcome([30, pair[0]], [30, pair[1]], [30, pair[0]]) == EQUAL
    assert zeros_outcome([30, pair[0]], [30, pair[1]], None) == (EQUAL if pair == (0, 0) else UNEQUAL), "in fp32"


def test_few_elements_cancel_by_chance_in_fp32() -> None:
    """One was found in 49 runs: in the step after a change of plan, and with three other seeds none."""
    assert zeros_outcome([64, 64], [64, 65], None) == zeros_outcome([64, 0], [64, 1], None) == EQUAL
    assert zeros_outcome([64, 64], [64, 67], None) == UNEQUAL


def test_chance_alone_makes_no_recipe_of_a_file_unequal() -> None:
    numbers = np.random.default_rng(0)
    for mean in np.repeat([1, 10, 100, 1000], 60):
        stock, run, other = numbers.poisson(mean, (3, 12)).tolist()
        assert zeros_outcome(stock, run, other) == EQUAL


@pytest.mark.parametrize(
    ("stock", "run"),
    [
        pytest.param([300] * 2, [300, 600], id="twice as many in a step with hundreds"),
        pytest.param([20] * 12, [40] * 12, id="twice as many in each step"),
        pytest.param([120] * 12, [60] * 12, id="one of two shards is left out"),
        pytest.param([60] * 12, [90] * 12, id="one of two shards is counted twice"),
        pytest.param([400] * 12, [450] * 12, id="one of eight shards is counted twice"),
        pytest.param([30, 30], [30, math.nan], id="no number"),
    ],
)
def test_wrong_numbers_of_zeros_are_found(stock: list[float], run: list[float]) -> None:
    """Also where the stock runs differ by chance."""
    other = [count + math.sqrt(count) * (-1) ** step for step, count in enumerate(stock)]
    assert zeros_outcome(stock, run, other) == UNEQUAL


def test_zeros_may_differ_as_those_of_two_stock_runs_do() -> None:
    assert zeros_outcome([300] * 2, [600] * 2, [600] * 2) == EQUAL
    assert zeros_outcome([300] * 2, [900] * 2, [600] * 2) == UNEQUAL


def test_zeros_may_differ_as_those_of_stock_runs_that_share_experts_and_do_not() -> None:
    """What 5 of 12 steps counted where three replicas had all experts each, after a death among four that shared."""
    stock, run = [205.0] * 12, [205.0] * 2 + [51.0] * 5 + [205.0] * 5

    def compared(unshared: Sequence[float] | None) -> str:
        fewer = None if unshared is None else zeros(*unshared)
        still = zeros(*stock, loss=4.0)
        return judge(zeros(*stock), zeros(*run), still, zeros(*stock), DEATH, {}, fewer).outcome

    assert compared([83.0] * 12) == EQUAL
    assert compared(None) == compared([200.0] * 12) == UNEQUAL
    assert zeros_outcome(stock, run, [83.0] * 12) == EQUAL, "whichever stock run it is"


def test_a_comparison_that_could_not_fail_does_not_count() -> None:
    same = logged(3.0)
    assert outcome(same, same, logged(3.0 * 1.005)) == NO_CONTROL, "nothing is learnt"
    assert outcome(logged(3.0, skipped=1.0), logged(3.0, skipped=1.0), logged(4.0)) == NO_CONTROL


def test_all_workers_and_attempts_are_compared(tmp_path: Path) -> None:
    """Several numbers may stand under one name, as a validation's and a test's do; times are no part of it."""
    lines = [["lm loss", 1, 3.0], ["lm loss", 1, 3.5], ["iteration-time", 1, 0.1], ["mem-allocated-bytes", 1, 7]]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '["lm loss", 2, ')
    (tmp_path / "2.jsonl").write_text(json.dumps(["lm loss", 1, 3.0]) + "\n")
    found = read_logged(tmp_path)
    assert found == {("lm loss", 1): {3.0, 3.5}}
    assert differences(found, {("lm loss", 1): frozenset([3.5, 3.0])})["lm loss"].relative == 0.0
    assert differences(found, {("lm loss", 1): frozenset([3.0, 3.5, 3.6])})["lm loss"].relative == pytest.approx(1 / 36)


@pytest.mark.parametrize(
    ("workers", "tensor", "only"),
    [(4, 1, None), (4, 2, None), (8, 1, None), (8, 2, None), (8, 4, None), (4, 1, 1), (8, 1, 1), (8, 2, 2)],
)
def test_survivors_get_a_plan_that_megatrons_own_groups_cannot_run(workers: int, tensor: int, only: int | None) -> None:
    for seed in range(20):
        death = draw_death(Random(seed), workers, 1)
        assert death.iteration < HOLD_AT and death.point in POINTS
        survivors = [worker for worker in range(workers) if worker != death.worker]
        plan = unlike_replicas(survivors, tensor, 6, 8, only)
        assert plan.not_uniform is not None
        assert only is None or all(len(stage) == only for replica in plan.replicas for stage in replica.stages)
        assert set(plan.members) <= set(survivors)


def test_models_that_train_otherwise_in_other_degrees_keep_their_own() -> None:
    """Latents that members share, for one."""
    words = ("--micro-batch-size", "2", "--global-batch-size", "16", "--num-layers", "4")
    dense, latent = (plan_of(Shrunk(each, 4), DEATH) for each in (words, (*words, "--multi-latent-attention")))
    assert any(len(stage) > 1 for replica in dense.replicas for stage in replica.stages)
    assert {len(stage) for replica in latent.replicas for stage in replica.stages} == {1}
    assert latent.not_uniform is not None


@pytest.mark.parametrize(("tensor", "pipeline", "context"), [(2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_survivors_of_a_job_with_context_parallelism_share_sequences_as_the_job_does(
    tensor: int, pipeline: int, context: int
) -> None:
    for dead in range(8):
        survivors = [worker for worker in range(8) if worker != dead]
        plan = sharing_replicas(survivors, tensor, pipeline, Sharing(context), 6)
        assert plan.not_uniform is None and plan.context_parallel == len(plan.replicas) == context
        assert plan.micro_batch_count == 6 and set(plan.members) <= set(survivors)
        assert {len(replica.stages) for replica in plan.replicas} == {pipeline}
        assert {len(stage) for replica in plan.replicas for stage in replica.stages} == {tensor}


def test_what_survivors_change_to_is_never_what_they_run_already() -> None:
    """One replica of all four that live: those that survive the second replica's loss of a worker are these, too."""
    plan = sharing_replicas([0, 1, 2, 3, 4, 6, 7], 2, 2, Sharing(1, 1, 1), 8)
    assert [replica.stages for replica in plan.replicas] == [((7, 6), (4, 3))]


@pytest.mark.parametrize(("tensor", "pipeline", "sharers", "members"), [(2, 1, 2, 1), (1, 2, 2, 0), (4, 1, 1, 2)])
def test_survivors_of_a_job_with_expert_parallelism_share_experts_as_the_job_does(
    tensor: int, pipeline: int, sharers: int, members: int
) -> None:
    survivors = list(range(1, 8))
    plan = sharing_replicas(survivors, tensor, pipeline, Sharing(1, sharers, members), 8)
    assert plan.not_uniform is None and plan.expert_parallel == len(plan.replicas) == sharers
    assert plan.expert_members == members and plan.micro_batch_count == 8 and set(plan.members) <= set(survivors)


@pytest.mark.parametrize(("context", "experts"), [(2, 2), (2, 4), (4, 2)])
def test_survivors_of_a_job_with_both_share_sequences_and_experts_as_the_job_does(context: int, experts: int) -> None:
    plan = sharing_replicas(range(1, 8), 1, 1, Sharing(context, experts), 8)
    assert (plan.context_parallel, plan.expert_parallel, len(plan.replicas)) == (
        context,
        experts,
        max(context, experts),
    )
    assert plan.not_uniform is None and plan.micro_batch_count == 8


def test_a_benchmark_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    one, other = Shrunk(("--a",), 4, kernels=("--k",)), Shrunk(("--b",), 4)
    lost = Shrunk(("--c",), 4, lost=("fp8's numbers: --fp8-format",))
    lines = lines_of([("first", one), ("second", other), ("third", one), ("fourth", lost)])
    assert [line.names for line in lines] == [("first", "third"), ("second",), ("fourth",)]
    results = Results(tmp_path, seed=3)
    assert results.read(lines[0]) is None
    results.write(lines[0], Verdict(EQUAL, loss=1e-6, control=0.2, seconds={"stock": 4.0}))
    found = summary(4, 4, lines, Results(tmp_path, seed=3))
    assert (found["distinct"], found["trained"], found["equal"], found["kernel_replaced"]) == (3, 2, 2, 2)
    assert found["not_tried"] == 1 and found["not_run_on_cpu"] == {"fp8's numbers: --fp8-format": 1}
    assert Results(tmp_path, seed=4).read(lines[0]) is None, "other deaths"
    results.write(lines[1], Verdict(FAILED, "stock: exit code 1", seconds={}))
    assert summary(4, 4, lines, results)["failed"] == {"second": "stock: exit code 1"}


def test_what_differs_is_named_with_its_numbers(tmp_path: Path) -> None:
    line = Line(Shrunk(("--a",), 4), ("first",))
    results = Results(tmp_path, seed=0)
    results.write(line, judge(logged(3.0, norm=1.0), logged(3.0), logged(4.0), None, DEATH, {}))
    [said] = summary(1, 1, [line], results)["unequal"]["first"]
    assert said == f"norm at 1: [1.0] and [], relatively inf (at most {FP32:.2g})"


def test_a_norm_of_parameters_that_follows_from_the_number_of_replicas_differs_as_stock_megatrons_does() -> None:
    """By as much as one replica's does, and nothing else by more."""
    stock, run, still = ({**logged(3.0), **norms(29.0)}, {**logged(3.0), **norms(29.02)}, logged(4.0))
    alone = {**logged(9.0), **norms(29.03)}
    others = {**logged(3.0), **norms(29.01)}
    assert judge(stock, run, still, others, DEATH, {}).outcome == UNEQUAL
    assert judge(stock, run, still, others, DEATH, {}, None, alone).outcome == EQUAL
    assert judge(stock, {**run, **norms(29.06)}, still, others, DEATH, {}, None, alone).outcome == UNEQUAL
    worse = {**run, ("lm loss", 2): frozenset([3.1])}
    assert judge(stock, worse, still, others, DEATH, {}, None, alone).outcome == UNEQUAL


def norms(value: float) -> Logged:
    return {(tag, step): frozenset([value]) for tag in ("params-norm", "params-norm vs samples") for step in (1, 2)}
