# SPDX-License-Identifier: Apache-2.0
"""What `resihp check` says of single losses and of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import training_from_arguments
from megatron_resihp.integration.check.findings import told_of_losses, told_of_memory, told_of_traffic
from megatron_resihp.integration.check.losses import Outlook, outlook
from megatron_resihp.plan import even_chunks, spelled_out
from megatron_resihp.planner import JobShape, NoPlanError, initial_plan
from megatron_resihp.protocol.job import JobDescription

NODE = 8
ARGUMENTS: dict[str, Any] = {**PRESETS["llama2-7b"], "seq_length": 4096, "recompute_granularity": "selective"}
JOB = JobDescription(2, 4, 32, even_chunks(32, 4), 4096, True, pipeline_last=False, device_memory=80 << 30)


def of(workers: int, per_node: int = NODE, job: JobDescription = JOB, **more: Any) -> Outlook:
    return outlook(job, JobSize(workers // per_node, per_node), ARGUMENTS | more)


def test_every_node_is_a_replica() -> None:
    found = of(16)
    assert found.losses == "losing node 0 (the coordinator's) ends the job; any other one may be lost"
    assert found.without_plan == {}
    assert found.first is not None and found.after is not None and found.changing is not None
    assert found.first.bytes <= found.after[1].bytes
    assert found.changing[1].bytes < found.first.bytes  # survivors keep their shards, and have no activations meanwhile


def test_losses_that_differ_in_which_experts_are_lost_are_tried_once() -> None:
    """Eight workers of two stages, of which four replicas share experts that each lives once. With copies, one loss is
    survived. Without, each is not: one worker of each stage is tried, and the only node that may be lost."""
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 11008, "moe_router_topk": 2, "expert_model_parallel_size": 4}
    job = replace(JOB, tensor_parallel=1, pipeline_parallel=2, chunks=even_chunks(32, 2), distributed_optimizer=False,
                  micro_batches=8, expert_parallel=4, experts=8, pipeline_last=True, device_memory=None)  # fmt: skip
    without = of(8, 4, replace(job, expert_copies=False), **experts).without_plan
    assert list(without) == ["worker 0", "worker 4", "node 1"]
    assert all("experts" in without[name] for name in ("worker 0", "worker 4"))
    assert not of(8, 4, replace(job, expert_copies=True), **experts).without_plan.keys() & {"worker 0", "worker 4"}


def test_figures_are_the_cost_models() -> None:
    plan = spelled_out(initial_plan(JobShape(2, 4, 32, NODE), 16, pipeline_last=False), JOB.chunks)
    used = memory_of(plan, model_from_arguments(ARGUMENTS), training_from_arguments(ARGUMENTS))
    found = of(16)
    assert found.first is not None
    assert found.first.bytes == max(use.total for use in used.values()) == used[found.first.worker].total


def test_state_that_is_on_one_node_only() -> None:
    """Megatron's default order of ranks: with four nodes each stage is on one of them."""
    found = of(32, job=replace(JOB, pipeline_last=True))
    assert "losing node 0 (the coordinator's), node 1, node 2 or node 3 ends the job" in found.losses
    assert "start it with --resihp-spread-replicas" in found.losses
    assert found.without_plan.keys() == {"node 1", "node 2", "node 3"}
    assert list(told_of_losses(found))[1].startswith("no plan after the loss of node 1: the state of stage 1 TP rank 0")


def test_a_part_of_the_optimizer_and_its_copy_on_one_node() -> None:
    job = replace(JOB, pipeline_parallel=1, chunks=even_chunks(32, 1), distributed_optimizer=True)
    found = of(16, job=job)
    assert found.without_plan.keys() == {"node 1"} and "died with its copy" in found.without_plan["node 1"]
    for change in ({"distributed_optimizer": False}, {"spread_replicas": True}):
        assert of(16, job=replace(job, **change)).without_plan == {}


def test_what_crosses_nodes_is_said_of_both_layouts() -> None:
    """With four nodes and Megatron's order stages are apart, with the flag replicas are."""
    job = replace(JOB, pipeline_last=True)
    unasked, asked = (of(32, job=replace(job, spread_replicas=spread)) for spread in (False, True))
    assert unasked.sent is not None and asked.sent == replace(unasked.sent, asked=True)
    assert unasked.sent.unspread.gradients == 0 == unasked.sent.spread.results
    assert unasked.sent.unspread.results > 0 and unasked.sent.spread.gradients > 0
    now, then = told_of_traffic(unasked.sent)
    assert now.startswith("in Megatron's order of ranks: the busiest node sends others 0.0 GiB of gradients and ")
    assert then.endswith("; losing node 0 (the coordinator's) ends the job; any other one may be lost")
    assert [*told_of_traffic(asked.sent)] == [now, then.partition("; losing")[0]]
    assert asked.without_plan == {} and asked.losses in then


def test_a_flag_that_changes_nothing() -> None:
    assert list(told_of_traffic(of(16).sent))[1:] == ["--resihp-spread-replicas changes nothing here"]
    assert of(8).sent is None and not [*told_of_traffic(None)]


EXPERTS: dict[str, Any] = {
    "num_experts": 8, "moe_ffn_hidden_size": 11008, "moe_router_topk": 2, "expert_model_parallel_size": 8,
}  # fmt: skip
SHARES = replace(
    JOB, tensor_parallel=1, pipeline_parallel=1, chunks=even_chunks(32, 1), distributed_optimizer=True,
    micro_batches=16, expert_parallel=8, experts=8, pipeline_last=True,
)  # fmt: skip


def test_a_flag_that_is_refused_where_replicas_share() -> None:
    for name, changed, arguments in (
        ("expert-model", SHARES, EXPERTS),
        ("context", replace(JOB, context_parallel=2), {"context_parallel_size": 2}),
    ):
        lines = list(told_of_traffic(of(16, job=replace(changed, device_memory=None), **arguments).sent))
        assert lines[1:] == [f"--resihp-spread-replicas is refused with --{name}-parallel-size"]


def test_losses_after_which_memory_does_not_suffice() -> None:
    """Each shard has another holder, but the survivors would have more of the experts than they have room for."""
    first, *others = told_of_losses(of(8, job=SHARES, **EXPERTS))
    assert first == "every shard has another holder, but:"
    assert others and others[0].startswith("no plan after the loss of worker 0: ") and "memory exceeded" in others[0]
    assert "uniform plans only" not in others[0], "the job could run no other plan, whatever its memory"
    first, *others = told_of_losses(of(16, job=SHARES, **EXPERTS))
    assert first.endswith("; every shard has another holder, but:") == bool(others)


def test_losses_that_leave_too_few_workers() -> None:
    found = outlook(JOB, JobSize(2, NODE), ARGUMENTS, fewest=9)
    assert found.losses.startswith("losing any node ends the job")
    assert found.without_plan == {"node 1": "8 are left, fewer than --min-workers 9"}


def test_one_replica_survives_no_loss() -> None:
    found = of(8)
    assert "losing any worker ends the job" in found.losses
    assert len(found.without_plan) == 8
    assert list(told_of_losses(found))[-1] == "nor after 5 other kinds of losses"


def test_what_does_not_fit_is_said() -> None:
    large, small = of(16), of(16, job=replace(JOB, device_memory=24 << 30))
    assert [line.count("fits") for line in told_of_memory(large)] == [1, 1, 1]
    assert any("loss of worker" in line and "DOES NOT FIT" in line for line in told_of_memory(small))


def test_without_the_devices_memory_only_needs_are_said() -> None:
    lines = list(told_of_memory(of(16, job=replace(JOB, device_memory=None))))
    assert lines[-1] == "give --memory-gib GIB, of each GPU, to compare" and "FIT" not in "".join(lines)


def test_a_model_that_is_not_modelled() -> None:
    (line,) = told_of_memory(of(16, moe_latent_size=4))
    assert line == "not known: moe_latent_size is not modelled"


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(NoPlanError, match="not a multiple of TP x PP"):
        of(12, per_node=4)
