# SPDX-License-Identifier: Apache-2.0
"""A plan → the Layout of its workers and links. Imports numpy and `plan`.

In plans that Megatron's own groups cannot run, and where sequences are shared by unlike numbers of replicas, stages
with the same number may differ. There `Layout.stage` numbers
kinds of work, so that only workers with the same layers, degree and kinds of ops are compared with each other.

Replicas that share sequences or experts meet in every layer, as members of a tensor-parallel group do. So here they
count as one replica, whose stages have the members of all of them.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.plan.parallel_plan import ParallelPlan, meeting_groups, shared_with

Work = tuple[object, ...]


def layout_of(plan: ParallelPlan, epoch: int, node_of: Mapping[int, int], interleaved: bool = False) -> Layout:
    """The position of each working worker in the plan; standbys are left out.

    Args:
        plan: the plan of the epoch.
        epoch: its number.
        node_of: worker id → index of its machine.
        interleaved: whether workers hold several model chunks, so that the last stage sends to the first.
    """
    uniform = plan.not_uniform is None
    native = uniform and not plan.context_groups
    numbers = _numbers(plan)
    places = [
        (worker, group, coordinate.stage if native else numbers[_work(plan, number, coordinate.stage)],
         coordinate.tp_rank + place * len(plan.replicas[number].stages[coordinate.stage]), node_of[worker])
        for group, members in enumerate(meeting_groups(plan))
        for place, number in enumerate(members)
        for worker, coordinate in plan.replicas[number].workers()
    ]  # fmt: skip
    workers, replica, stage, tp_rank, node = np.array(places, dtype=np.int64).T
    links = _native_links(plan, interleaved) if uniform else _links(plan)
    ends = np.array(links, dtype=np.int64).reshape(-1, 2)
    return Layout(epoch, workers, replica, stage, tp_rank, node, ends, native)


def _native_links(plan: ParallelPlan, interleaved: bool) -> list[tuple[int, int]]:
    links: list[tuple[int, int]] = []
    for each in plan.replicas:
        hops = list(zip(each.stages, each.stages[1:], strict=False))
        if interleaved and len(each.stages) > 2:
            hops.append((each.stages[-1], each.stages[0]))
        links += [lane for before, after in hops for lane in zip(before, after, strict=True)]
    return links


def _numbers(plan: ParallelPlan) -> dict[Work, int]:
    """A number for each kind of work that stages do."""
    stages = ((number, stage) for number, each in enumerate(plan.replicas) for stage in range(len(each.stages)))
    kinds = (_work(plan, number, stage) for number, stage in stages)
    return {work: number for number, work in enumerate(dict.fromkeys(kinds))}


def _work(plan: ParallelPlan, number: int, stage: int) -> Work:
    """What distinguishes a stage's ops from others': its layers, its degree, whether B includes W, and how many
    replicas share its sequences."""
    replica = plan.replicas[number]
    layers = tuple((chunk.first, chunk.end) for chunk in replica.chunks if chunk.stage == stage)
    splits = replica.schedule is not None and replica.schedule.splits_backward
    return (layers if replica.chunks else stage, len(replica.stages[stage]), splits, len(shared_with(plan, number)))


def _links(plan: ParallelPlan) -> list[tuple[int, int]]:
    """The pairs of workers that send each other data, each once."""
    found: dict[tuple[int, int], None] = {}
    for path in _paths(plan):
        for before, after in pairwise(path):
            if before != after:
                found.update(dict.fromkeys((min(lane), max(lane)) for lane in _lanes(before, after)))
    return list(found)


def _paths(plan: ParallelPlan) -> Iterator[list[tuple[int, ...]]]:
    """The groups that run a micro-batch's chunks, in order: for each replica, and for each migrated micro-batch."""
    for replica in plan.replicas:
        yield [replica.stages[stage] for stage in replica.stage_of_chunk]
    owner = {micro_batch: replica for replica in plan.replicas for micro_batch in replica.micro_batches}
    for micro_batch in dict.fromkeys(moved.micro_batch for moved in plan.migrations):
        runner = {moved.chunk: plan.replicas[moved.replica] for moved in plan.migrations
                  if moved.micro_batch == micro_batch}  # fmt: skip
        home = owner[micro_batch]
        replicas = [runner.get(chunk, home) for chunk in range(len(home.stage_of_chunk))]
        yield [each.stages[each.stage_of_chunk[chunk]] for chunk, each in enumerate(replicas)]


def _lanes(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Members whose parts of a tensor overlap."""
    senders, receivers = len(before), len(after)
    for i, sender in enumerate(before):
        for k, receiver in enumerate(after):
            if i * receivers < (k + 1) * senders and k * senders < (i + 1) * receivers:
                yield sender, receiver
