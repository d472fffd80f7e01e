# SPDX-License-Identifier: Apache-2.0
"""How a worker runs a plan in either mode: what it evaluates, sums and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.training import training

from megatron_resihp.control.node.environment import SLOTS
from megatron_resihp.integration.job import Job
from megatron_resihp.integration.modes import heterogeneous, shared_out
from megatron_resihp.integration.modes.choice import mode_of
from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode
from megatron_resihp.integration.modes.mode import Mode
from megatron_resihp.integration.modes.shared_out import SharedOutMode
from megatron_resihp.integration.modes.uniform import UniformMode
from megatron_resihp.integration.patches import documents
from megatron_resihp.integration.patches.schedule import wrap_get_forward_backward_func
from megatron_resihp.integration.progress import Progress
from megatron_resihp.integration.step.loss_scale import Averaging
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Shard

LAYERS = (Chunk(0, 0, 6),)
HETEROGENEOUS = ParallelPlan((Replica(((0,),), (0, 1), LAYERS), Replica(((1, 2),), (2,), LAYERS)), {3: None})
OWN = OwnLayout(LAYERS, 1, 3, False, None)
THREE_REPLICAS = ParallelPlan(tuple(Replica(((each,),), (each,)) for each in range(3)))


@pytest.fixture(autouse=True)
def all_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SLOTS, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")


class Group:
    """A group whose other members bring the same number to each sum."""

    def __init__(self, workers: Sequence[int], others: float) -> None:
        self.workers = workers
        self._others = others

    def sum(self, values: torch.Tensor) -> None:
        values += self._others


def job(
    worker: int, *, distributed_optimizer: bool = False, per_token: bool = False, instances: int = 1,
    bf16: bool = False, own: OwnLayout = OWN, early: bool = False,
) -> Any:  # fmt: skip
    """What modes ask of a worker's job of six layers and three micro-batches."""
    args = SimpleNamespace(
        use_tp_pp_dp_mapping=False, calculate_per_token_loss=per_token, global_batch_size=3, micro_batch_size=1,
        fp16=False, bf16=bf16, accumulate_allreduce_grads_in_fp32=False, eval_iters=0, eval_micro_batch_size=1,
    )  # fmt: skip
    return SimpleNamespace(
        worker=worker, reach=lambda point: None, progress=Progress(),
        setup=SimpleNamespace(sizes=SimpleNamespace(own=lambda args: {"overlap_grad_reduce": early})),
        job=Job(cast(Any, None), args, cast(Any, None), own, distributed_optimizer, instances, "", None),
    )  # fmt: skip


def mode(plan: ParallelPlan, runtime: Any, others: float = 0.0) -> Mode:
    def make_group(name: str, workers: Sequence[int]) -> Any:
        return Group(workers, others)

    runtime.mode = mode_of(runtime, plan, make_group)
    found: Mode = runtime.mode
    return found


@pytest.mark.parametrize(
    ("plan", "distributed_optimizer", "expected"),
    [
        (THREE_REPLICAS, False, UniformMode),
        (THREE_REPLICAS, True, SharedOutMode),
        (HETEROGENEOUS, False, HeterogeneousMode),
        (HETEROGENEOUS, True, HeterogeneousMode),
    ],
)
def test_a_plan_has_one_mode(plan: ParallelPlan, distributed_optimizer: bool, expected: type[Mode]) -> None:
    found = mode(plan, job(0, distributed_optimizer=distributed_optimizer))
    assert type(found) is expected and found.everybody.workers == plan.members


def test_megatron_divides_its_own_sums_of_gradients_by_the_replicas_and_no_others() -> None:
    averages = [mode(plan, job(0)).averaging for plan in (THREE_REPLICAS, HETEROGENEOUS)]
    assert averages == [Averaging(False, 3, 3, 3), Averaging(False, 3, 3, 1)]


def test_each_worker_divides_its_losses_by_its_own_tokens() -> None:
    """Who shares its sequences with fewer has more of them, so its losses count for as much more."""
    hands = ((0, 1), (0, 1), (2,))
    replicas = tuple(Replica(((w,),), hand) for w, hand in enumerate(hands))
    plan = ParallelPlan(replicas, {3: None}, context_parallel=2, context_groups=(2, 1))
    averages = [mode(plan, job(worker)).averaging for worker in range(4)]
    assert [each.weight for each in averages] == [1, 1, 2, 1]
    assert {(each.micro_batches, each.first_replicas, each.replicas) for each in averages} == {(3, 3, 1.5)}


def test_losses_are_multiplied_as_in_the_first_plan_unless_sums_overflow_too() -> None:
    two_replicas = ParallelPlan((Replica(((0,),), (0, 1)), Replica(((1,),), (2,))), {2: None})
    averages = []
    for wide in (True, False):
        runtime = job(0)
        runtime.job.args.fp16, runtime.job.args.accumulate_allreduce_grads_in_fp32 = True, wide
        averages.append([mode(plan, runtime).averaging for plan in (two_replicas, HETEROGENEOUS)])
    assert averages == [
        [Averaging(False, 3, 3, 2), Averaging(False, 3, 3, 1)],
        [Averaging(False, 3, 2, 2), Averaging(False, 3, 1, 1)],
    ]


def test_a_mode_that_was_closed_has_no_groups_and_still_says_what_the_worker_was() -> None:
    for plan in (THREE_REPLICAS, HETEROGENEOUS):
        closed = mode(plan, job(0))
        for _ in range(2):  # a recovery may be begun again
            closed.close()
        assert not hasattr(closed, "everybody")
        assert closed.view.works


def test_checkpoints_of_heterogeneous_plans_say_that_a_distributed_optimizer_can_load_them() -> None:
    kinds = [mode(plan, job(0, distributed_optimizer=True)).state.checkpoint_metadata
             for plan in (THREE_REPLICAS, HETEROGENEOUS)]  # fmt: skip
    assert kinds == [{}, {"distrib_optim_sharding_type": "fully_reshardable"}]


def test_the_first_chunk_is_gathered_once_all_have_stepped_and_waits_for_its_own_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    beside = SimpleNamespace(wait_event=lambda event: told.append(f"wait for {event}"))
    stepping = SimpleNamespace(record_event=lambda: told.append("mark") or "mark")  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stepping)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: beside)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(told.append("beside")))
    monkeypatch.setattr(shared_out, "step_part", told.append)
    runtime = job(0, distributed_optimizer=True)
    runtime.job.args.overlap_param_gather = runtime.job.args.overlap_param_gather_with_optimizer_step = True
    chunk = SimpleNamespace(start_param_sync=lambda force_dispatch: told.append("gather"))
    runtime.held = SimpleNamespace(live=SimpleNamespace(model=[chunk, None]))
    found = mode(THREE_REPLICAS, runtime)
    found.step(SimpleNamespace(chained_optimizers=["first", "others"]))
    assert told == ["first", "mark", "others"]
    found.after_step()
    assert told[3:] == ["wait for mark", "beside", "gather"]


# ---- evaluation


def schedule(**options: Any) -> list[dict[str, torch.Tensor]]:
    """Megatron's, on a worker with the last stage: sum of losses and number of tokens of each micro-batch."""
    assert options["num_microbatches"] >= 1, "Megatron's schedules run at least one"
    counts = range(1, options["num_microbatches"] + 1)
    return [{"lm loss": torch.tensor([6.0, 2.0]), "one number": torch.tensor(float(each))} for each in counts]


@pytest.mark.parametrize(("micro_batches", "counted"), [(2, [1, 1, 0]), (3, [1, 1, 1]), (5, [2, 2, 1])])
def test_each_micro_batch_counts_once(micro_batches: int, counted: list[int]) -> None:
    """Of three replicas. One that has none runs one as well, or the others would wait for it where sums are taken."""
    for replica, expected in enumerate(counted):
        runtime = job(replica)
        mode(THREE_REPLICAS, runtime)
        losses = wrap_get_forward_backward_func(runtime, lambda: schedule)()(
            forward_only=True, num_microbatches=micro_batches
        )
        assert len(losses) >= 1
        assert sum(each["lm loss"].tolist()[0] for each in losses) == 6.0 * expected
        assert sum(each["lm loss"].tolist()[1] for each in losses) == 2.0 * expected
        assert losses[0]["one number"].item() == 1.0, "there is no better one where none counts"


IN_TURNS = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))
TWO_STAGES = ParallelPlan(tuple(Replica(((2 * each,), (2 * each + 1,)), (each, each + 3)) for each in range(3)))


@pytest.mark.parametrize(("micro_batches", "counted"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (10, [4, 3, 3])])
def test_an_interleaved_pipeline_runs_a_micro_batch_for_each_stage_at_least(
    micro_batches: int, counted: list[int]
) -> None:
    """Those that it has no share of count nothing."""
    for replica, expected in enumerate(counted):
        own = OwnLayout(IN_TURNS, 1, 3, False, None, micro_batch_group=2)
        runtime, config = job(2 * replica + 1, own=own), SimpleNamespace()
        view = mode(TWO_STAGES, runtime).view
        losses = wrap_get_forward_backward_func(runtime, lambda: schedule)()(
            forward_only=True, num_microbatches=micro_batches, model=[SimpleNamespace(config=config)]
        )
        assert len(losses) == len(view.evaluation_order(micro_batches)) == max(expected, 2)
        assert sum(each["lm loss"].tolist()[0] for each in losses) == 6.0 * expected
        mean = sum(each["one number"].item() for each in losses) / len(losses)
        assert mean == sum(range(1, expected + 1)) / expected, "Megatron divides by how many there are"
        assert config.microbatch_group_size_per_vp_stage == {4: 2, 3: 3}.get(expected, 2)


# ---- gradients


def test_a_standby_divides_by_the_tokens_of_others_only() -> None:
    """Those that work count 8."""
    factors: list[float] = []
    standby = job(3, per_token=True)
    standby.held = SimpleNamespace(live=SimpleNamespace(model=[SimpleNamespace(scale_gradients=factors.append)]))
    mode(HETEROGENEOUS, standby, others=8.0).share_gradients()
    assert factors == [1 / 8]


@pytest.mark.parametrize(("others", "times"), [(0.0, 1), (1.0, 2)])
def test_a_standby_sums_again_what_workers_have_summed_in_a_round_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch, others: float, times: int
) -> None:
    """It has taken part in sums while they ran their ops, and hears only afterwards that Megatron ran these again."""
    summed: list[bool] = []

    def sum_gradients(buckets: Any, views: Any, contributed: Any) -> None:
        summed.extend(bucket.is_whole for bucket in buckets)

    monkeypatch.setattr(heterogeneous, "sum_gradients", sum_gradients)
    monkeypatch.setattr(heterogeneous, "summed_views", lambda model, shares: {})
    standby = job(3, early=True)
    standby.held = SimpleNamespace(live=SimpleNamespace(model=[]))
    kept = replace(HETEROGENEOUS, standbys={3: (Shard(0, 6, 0, 1),)})
    mode(kept, standby, others).share_gradients()
    cuts, whole = summed.count(False), summed.count(True)
    both_cuts_of_each_layer = 2 * 6
    assert (cuts, whole) == (both_cuts_of_each_layer * times, 1) and summed[-1]


# ---- parameters


@pytest.mark.parametrize(
    ("replicas", "own", "bf16", "shared", "expected"),
    [
        (4, 2, True, True, 3 + 2 * 5), (3, 2, True, True, 3 + 2 * 5), (2, 2, True, True, 3 + 2 * 5),
        (6, 3, True, True, 3 + 3 * 5), (5, 1, True, True, 3 + 5), (3, 2, False, True, 3 + 5), (3, 2, True, False, 3),
    ],
)  # fmt: skip
def test_masters_in_parts_count_once_for_each_instance_that_the_job_itself_has(
    replicas: int, own: int, bf16: bool, shared: bool, expected: float
) -> None:
    """Megatron counts them once for each instance of the plan in force; in fp16 it counts parameters instead."""
    plan = ParallelPlan(tuple(Replica(((each,),), (each,)) for each in range(replicas)))
    runtime = job(0, distributed_optimizer=shared, instances=own, bf16=bf16)
    found = mode(plan, runtime)
    whole, in_parts = SimpleNamespace(squared=3.0), SimpleNamespace(squared=5.0, main_param_sharded=True)
    parameters = [whole, in_parts] if shared else [whole]
    runtime.held = SimpleNamespace(live=SimpleNamespace(model=[SimpleNamespace(parameters=lambda: iter(parameters))]))

    def megatrons(model: Sequence[Any]) -> float:
        times = found.instances if bf16 else 1  # type: ignore[attr-defined]
        counted = [each for chunk in model for each in chunk.parameters()]
        return math.sqrt(sum(each.squared * (times if each is in_parts else 1) for each in counted))

    assert found.counts.parameters_norm(megatrons) == pytest.approx(math.sqrt(expected))


# ---- documents


def consumer(plan: ParallelPlan, agreed: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What train() calls on a worker that has seen a document."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training, "_seqlen_stats_in_iteration", None)
    monkeypatch.setattr(training, "_seqlen_stats_active", False)
    training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 7]))
    runtime = job(0)
    mode(plan, runtime)
    runtime.progress.documents = agreed
    return partial(documents.wrap_consume(runtime, lambda: (1.0, 2.0)))


def test_under_a_heterogeneous_plan_what_was_agreed_on_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collective: a worker without work has seen no document and would not join it."""
    consume = consumer(HETEROGENEOUS, (24.0, 136.0), monkeypatch)
    assert consume() == (24.0, 136.0)
    assert documents.seen_so_far() is None
    assert consume() == (None, None)


def test_megatrons_own_groups_count_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert consumer(THREE_REPLICAS, (24.0, 136.0), monkeypatch)() == (1.0, 2.0)
