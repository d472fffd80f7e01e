# SPDX-License-Identifier: Apache-2.0
"""Any plan in real Megatron: a running job changes to it, trains on with the same losses, and changes back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, Job, Jobs, Tolerance, ask_for, check_training, tiny

from megatron_resihp.plan import Chunk, Migration, ParallelPlan, PlannedOp, Replica, Schedule, Shard
from megatron_resihp.plan.schedule import EXPLICIT

MODEL: dict[str, Any] = {"num_layers": 4, "global_batch_size": 8, "train_iters": 18}
"""Layers 0 to 5: the embedding, four decoder layers, the head."""
UNIFORM_LAYOUT: dict[str, Any] = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
"""Four workers in one replica, eight in two."""
UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
PREDICTIONS: dict[str, Any] = UNTIED | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
"""Two further tokens are predicted; their losses weigh so much that a wrong share of one is seen."""
GROUPED: dict[str, Any] = {
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm",
    "disable_bias_linear": True, "ffn_hidden_size": 64,
}  # fmt: skip
"""Grouped queries and gated MLPs, with one matrix for word embeddings and head."""
LLAMA: dict[str, Any] = UNTIED | GROUPED
NIGHTLY = pytest.mark.nightly
PER_TOKEN: dict[str, Any] = {"calculate_per_token_loss": True}
EVERYTHING = tuple(range(8))


def stages(*members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, members))


def chunks(*ends: int) -> tuple[Chunk, ...]:
    """One chunk for each stage."""
    return tuple(Chunk(stage, first, end) for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False)))


def interleaved_order(homes: Sequence[int], stage: int, micro_batches: Sequence[int]) -> tuple[PlannedOp, ...]:
    """All forwards, micro-batch by micro-batch, then all backwards the other way round: any placement can run so."""
    forwards = [PlannedOp("F", chunk, m) for m in micro_batches for chunk, home in enumerate(homes) if home == stage]
    return (*forwards, *(op._replace(kind="B") for op in reversed(forwards)))


def explicit(homes: Sequence[int], count: int, micro_batches: Sequence[int], weights: bool = False) -> Schedule:
    """`weights`: with all weight gradients at the end, the earliest ones last."""
    orders = [interleaved_order(homes, stage, micro_batches) for stage in range(count)]
    if weights:
        orders = [(*order, *(op._replace(kind="W") for op in order if op.kind == "B")) for order in orders]
    return Schedule(EXPLICIT, orders=tuple(orders))


def one(
    replica_stages: tuple[tuple[int, ...], ...], layers: tuple[Chunk, ...], schedule: Schedule | None = None
) -> Replica:
    return Replica(replica_stages, EVERYTHING, layers, schedule)


def two(first: Sequence[int], second: Sequence[int], *parts: Any) -> tuple[Replica, ...]:
    (stages_0, chunks_0), (stages_1, chunks_1) = parts
    return Replica(stages_0, tuple(first), chunks_0), Replica(stages_1, tuple(second), chunks_1)


def in_order(*micro_batches: Sequence[int], weights: bool = False) -> Schedule:
    """For each stage all forwards, then all backwards.

    Args:
        weights: whether weight gradients are ops of their own, each after the next B.
    """
    orders = []
    for stage, own in enumerate(micro_batches):
        forwards = [PlannedOp("F", stage, m) for m in own]
        later: list[tuple[float, PlannedOp]] = [(number, op._replace(kind="B")) for number, op in enumerate(forwards)]
        if weights:
            later += [(number + 1.5, op._replace(kind="W")) for number, op in enumerate(forwards)]
        orders.append((*forwards, *(op for _, op in sorted(later))))
    return Schedule(EXPLICIT, orders=tuple(orders))


def migrating() -> ParallelPlan:
    """Micro-batch 7 of the first replica goes through the second replica's second stage."""
    shares = (0, 2, 4, 6, 7), (1, 3, 5)
    schedules = in_order(shares[0], (0, 2, 4, 6)), in_order(shares[1], (1, 3, 5, 7))
    replicas = tuple(
        Replica(
            stages(*([2 * stage + 4 * number, 2 * stage + 4 * number + 1] for stage in range(2))),
            shares[number],
            chunks(3, 6),
            schedules[number],
        )
        for number in range(2)
    )
    return ParallelPlan(replicas, {}, (Migration(7, 1, 1),))


def helping(
    first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...], layers: tuple[Chunk, ...]
) -> ParallelPlan:
    """Two replicas with these stages, whose first stages do one micro-batch for each other; the second replica has no
    second stage, and the first one does its work. Weight gradients are ops of their own."""
    replicas = (
        Replica(first, (0, 1, 2, 3, 4), layers, in_order((0, 1, 2, 3, 7), EVERYTHING, weights=True)),
        Replica(second, (5, 6, 7), layers, in_order((4, 5, 6), (), weights=True)),
    )
    heads = (Migration(micro_batch, 1, 0) for micro_batch in (5, 6, 7))
    return ParallelPlan(replicas, {}, (Migration(4, 0, 1), Migration(7, 0, 0), *heads))


V_SHAPE = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(1, 3, 4), Chunk(0, 4, 6))
TURNS = (Chunk(0, 0, 2), Chunk(1, 2, 3), Chunk(0, 3, 4), Chunk(1, 4, 6))

FOUR: dict[str, ParallelPlan] = {
    "TP 2 and 1": ParallelPlan((one(stages([0, 1], [2]), chunks(3, 6)),), {3: None}),
    "TP 1 and 2": ParallelPlan((one(stages([3], [0, 1]), chunks(3, 6)),), {2: None}),
    "other layers": ParallelPlan((one(stages([0, 1], [2, 3]), chunks(4, 6)),), {}),
    "four stages": ParallelPlan((one(stages([0], [1], [2], [3]), chunks(1, 3, 5, 6)),), {}),
    "one stage": ParallelPlan((one(stages([0, 1]), chunks(6)),), {2: None, 3: None}),
    "TP 4": ParallelPlan((one(stages([3, 1, 2, 0]), chunks(6)),), {}),
    "TP 1": ParallelPlan((one(stages([2]), chunks(6)),), {0: None, 1: None, 3: None}),
    "unlike replicas": ParallelPlan(
        two([0, 1, 2, 3, 4], [5, 6, 7], (stages([0], [1, 2]), chunks(2, 6)), (stages([3]), chunks(6))), {}
    ),
    "interleaved": ParallelPlan(
        (one(stages([0, 1], [2, 3]), TURNS, Schedule("interleaved")),), {}
    ),
    "V shape": ParallelPlan((one(stages([0, 1], [2, 3]), V_SHAPE, explicit((0, 1, 1, 0), 2, EVERYTHING)),), {}),
    "V shape, W apart": ParallelPlan(
        (one(stages([0, 1], [2, 3]), V_SHAPE, explicit((0, 1, 1, 0), 2, EVERYTHING, weights=True)),), {}
    ),
    "zero bubble": ParallelPlan((one(stages([0, 1], [2, 3]), chunks(3, 6), Schedule("zero-bubble-h1")),), {}),
    "a standby keeps its shard": ParallelPlan(
        (one(stages([0, 1], [2]), chunks(3, 6)),), {3: (Shard(3, 6, 1, 2),)}
    ),
    "TP 2 and 1 help each other": helping(stages([0, 1], [2]), stages([3], []), chunks(3, 6)),
    "TP 1 helped by 2": helping(stages([2], [0, 1]), stages([3], []), chunks(2, 6)),
}  # fmt: skip


def survive(
    jobs: Jobs, path: Path, plans: Sequence[ParallelPlan], *, workers: int, tolerance: Tolerance = FP32, **model: Any
) -> Job:
    """Change from one plan to the next, every third iteration, and end with the job's own."""
    files = ask_for(path, *plans, every=3)
    reference = jobs.reference(tiny(**MODEL | model), workers=workers)
    job = jobs.run(tiny(**MODEL | model, resihp_plan=files), workers=workers)
    check_training(job, reference, tolerance)
    taken = [ParallelPlan.from_dict(event["plan"]) for event in job.events("epoch_started")]
    assert len(taken) == 1 + len(plans), job.tails()
    # Where nobody joins: nobody waits for joining workers until they have theirs.
    assert all(event["groups_made_ahead"] for event in job.events("reconfiguration"))
    return job


def own_plan(workers: int) -> ParallelPlan:
    """TP 2, PP 2, as the job starts."""
    replicas = workers // 4
    return ParallelPlan(
        tuple(
            Replica(
                stages(*([2 * replicas * stage + 2 * r + rank for rank in range(2)] for stage in range(2))),
                tuple(range(r, 8, replicas)),
            )
            for r in range(replicas)
        ),
        {},
    )


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("TP 2 and 1", "unlike replicas"), marks=NIGHTLY),
        pytest.param(("TP 2 and 1", "TP 1 and 2", "TP 4", "TP 1"), marks=NIGHTLY),
        pytest.param(("other layers", "four stages", "one stage", "unlike replicas"), marks=NIGHTLY),
        pytest.param(("interleaved", "V shape", "zero bubble", "a standby keeps its shard"), marks=NIGHTLY),
    ],
    ids=["both", "degrees", "stages", "orders"],
)
def test_from_plan_to_plan_and_back(jobs: Jobs, tmp_path: Path, names: Sequence[str]) -> None:
    """Gradients are divided by tokens, which whoever has the head counts; Adam would hide a wrong divisor."""
    plans = [*(FOUR[name] for name in names), own_plan(4)]
    survive(jobs, tmp_path, plans, workers=4, **UNIFORM_LAYOUT | PER_TOKEN)


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        (LLAMA | {"sequence_parallel": True}, FP32),
        ({"position_embedding_type": "learned_absolute", "no_rope_fusion": None} | PER_TOKEN, FP32),
        ({"bf16": True}, BF16),
        ({"bf16": True, "fp32_residual_connection": True}, BF16),
    ],
    ids=["llama, sequence parallel", "positions, per token", "bf16", "bf16, wide residual"],
)
def test_kinds_of_model(jobs: Jobs, tmp_path: Path, model: dict[str, Any], tolerance: Tolerance) -> None:
    plans = [FOUR["TP 2 and 1"], FOUR["unlike replicas"], own_plan(4)]
    survive(jobs, tmp_path, plans, workers=4, tolerance=tolerance, train_iters=12, **UNIFORM_LAYOUT | model)


@NIGHTLY
@pytest.mark.parametrize("weighing", [{}, PER_TOKEN], ids=["per micro-batch", "per token"])
def test_mixtures_of_experts_tell_of_their_balance(jobs: Jobs, tmp_path: Path, weighing: dict[str, Any]) -> None:
    """In Megatron's log, as means over the global batch, and over the iterations since the line before: some of them
    under another plan."""
    names = ("TP 2 and 1", "unlike replicas", "V shape, W apart", "TP 2 and 1 help each other")
    model = UNIFORM_LAYOUT | EXPERTS | weighing | {
        "sequence_parallel": True, "moe_layer_freq": "[0,1,1,1]", "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": 32, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.5, 0.5], "micro_batch_size": 2, "global_batch_size": 16, "log_interval": 2,
    }  # fmt: skip
    job = survive(jobs, tmp_path, [*(FOUR[name] for name in names), own_plan(4)], workers=4, **model)
    found, expected = balances(job), balances(jobs.reference(tiny(**MODEL | model), workers=4))
    assert list(expected) == [1, *range(2, MODEL["train_iters"] + 1, 2)], "the first one, and every second"
    assert {tuple(values) for values in expected.values()} == {BALANCES}
    assert found.keys() == expected.keys()
    for iteration, values in expected.items():
        assert found[iteration] == pytest.approx(values, rel=FP32.loss), iteration


BALANCES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


def balances(job: Job) -> dict[int, dict[str, float]]:
    """By iteration what Megatron's log says of the experts' balance, of whoever wrote it."""
    lines = [line for worker in range(job.workers) for line in job.log(worker).splitlines() if "lm loss:" in line]
    found = {}
    for line in lines:
        number = re.search(r"iteration +(\d+)/", line)
        assert number is not None
        found[int(number[1])] = {name: float(value) for name, value in re.findall(r"(\w+_loss): (\S+)", line)}
    return dict(sorted(found.items()))


@NIGHTLY
@pytest.mark.parametrize(
    "model",
    [
        LLAMA | {"sequence_parallel": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        UNTIED | PER_TOKEN,
        {"overlap_grad_reduce": True},
        {"num_workers": 2},
    ],
    ids=["llama, sequence parallel", "recomputed", "untied", "overlapping", "loaders"],
)
def test_orders_of_ops(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    names = ("zero bubble", "V shape, W apart", "unlike replicas", "a standby keeps its shard")
    plans = [*(FOUR[name] for name in names), own_plan(4)]
    survive(jobs, tmp_path, plans, workers=4, **UNIFORM_LAYOUT | model)


@pytest.mark.nightly
def test_sixteen_bits(jobs: Jobs, tmp_path: Path) -> None:
    survive(jobs, tmp_path, [FOUR["TP 2 and 1"]], workers=4, tolerance=BF16, train_iters=6, bf16=True, **UNIFORM_LAYOUT)


@NIGHTLY
def test_groups_for_host_tensors_beside_those_of_devices(jobs: Jobs, tmp_path: Path) -> None:
    """As with NCCL, whose own groups carry none: workers with and without tensor-parallel peers meet in others."""
    model = UNIFORM_LAYOUT | {"distributed_backend": "nccl", "train_iters": 6}
    survive(jobs, tmp_path, [FOUR["TP 2 and 1"]], workers=4, **model)


@pytest.mark.since_megatron("0.19")
@NIGHTLY
def test_packed_samples_of_a_micro_batch_cross_as_one(jobs: Jobs, documents: Path, tmp_path: Path) -> None:
    """To the layers they are one long sample; the job begins without a pipeline."""
    model = {
        "tensor_model_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 16, "train_iters": 6,
        "mock_data": False, "data_path": documents, "vocab_size": 257, "dataloader_inter_document_masking": True,
        "data_cache_path": documents.with_name("cache"), "sequence_parallel": True,
    }  # fmt: skip
    survive(jobs, tmp_path, [FOUR["TP 2 and 1"]], workers=4, **model)


@pytest.mark.nightly
def test_a_stage_works_for_another_replica(jobs: Jobs, tmp_path: Path) -> None:
    survive(jobs, tmp_path, [migrating(), own_plan(8)], workers=8, train_iters=9, **UNIFORM_LAYOUT)


@NIGHTLY
@pytest.mark.parametrize("model", [LLAMA, PER_TOKEN], ids=["llama", "tied, per token"])
def test_stages_of_unlike_degree_work_for_each_other(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    """What crosses is split over the tokens by other members than a replica's own."""
    plans = [FOUR["TP 2 and 1 help each other"], FOUR["TP 1 helped by 2"], own_plan(4)]
    survive(jobs, tmp_path, plans, workers=4, train_iters=12, sequence_parallel=True, **UNIFORM_LAYOUT | model)
