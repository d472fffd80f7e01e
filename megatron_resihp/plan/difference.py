# SPDX-License-Identifier: Apache-2.0
"""What changes from one plan to the next, as lines for users. Imports the other files of `plan`."""

from collections.abc import Iterator

from megatron_resihp.plan.microbatches import even_counts
from megatron_resihp.plan.parallel_plan import ParallelPlan
from megatron_resihp.plan.replica import Coordinate, Replica


def differences(before: ParallelPlan, after: ParallelPlan) -> tuple[str, ...]:
    """One line for each change, replicas first, then workers by id; empty if the plans are equal."""
    return (
        *_of_replicas(before, after),
        *_of_migrations(before, after),
        *_of_workers(before, after),
        *_of("context-parallel degree", _context(before), _context(after)),
        *_of("expert-parallel degree", before.expert_parallel, after.expert_parallel),
        *_of("experts dealt", _dealt(before), _dealt(after)),
        *_of("uneven shards", before.uneven_shards, after.uneven_shards),
    )


def _context(plan: ParallelPlan) -> str:
    """How many replicas share each sequence, "2", or "2+1" where groups differ."""
    return "+".join(map(str, plan.context_groups or (plan.context_parallel,)))


def _of_replicas(before: ParallelPlan, after: ParallelPlan) -> Iterator[str]:
    for number in range(max(len(before.replicas), len(after.replicas))):
        old, new = (plan.replicas[number] if number < len(plan.replicas) else None for plan in (before, after))
        name = f"replica {number}"
        if old is None or new is None:
            yield f"{name}: {'new, ' + _shape(new) if new else 'gone'}"
            continue
        yield from _of(f"{name}: shape", _shape(old), _shape(new))
        yield from _of(f"{name}: layers", _layers(old), _layers(new))
        yield from _of(f"{name}: micro-batches", _ranges(old.micro_batches), _ranges(new.micro_batches))
        if old.schedule != new.schedule:
            names = [each.schedule.name if each.schedule else "the job's own" for each in (old, new)]
            yield f"{name}: schedule {' → '.join(names) if names[0] != names[1] else names[0] + ', otherwise ordered'}"


def _of_migrations(before: ParallelPlan, after: ParallelPlan) -> Iterator[str]:
    for verb, left, right in (("no longer", before, after), ("now", after, before)):
        for micro_batch, chunk, replica in sorted(set(left.migrations) - set(right.migrations)):
            yield f"micro-batch {micro_batch}, chunk {chunk}: {verb} run by replica {replica}"


def _of_workers(before: ParallelPlan, after: ParallelPlan) -> Iterator[str]:
    for worker in sorted({*before.members, *after.members}):
        yield from _of(f"worker {worker}:", _place(before, worker), _place(after, worker))


def _of(name: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        yield f"{name} {old} → {new}"


def _place(plan: ParallelPlan, worker: int) -> str:
    replica, coordinate = plan.replica_of(worker), plan.coordinate_of(worker)
    if replica is not None and coordinate is not None:
        degree = len(plan.replicas[replica].stages[coordinate.stage])
        return f"replica {replica}, stage {coordinate.stage}, TP rank {coordinate.tp_rank} of {degree}"
    if worker not in plan.standbys:
        return "not there"
    kept = plan.standbys[worker]
    if kept is None:
        return "standby"
    if isinstance(kept, Coordinate):
        return f"standby with stage {kept.stage}, TP rank {kept.tp_rank}"
    shards = ", ".join(f"layers {s.first}–{s.end - 1} TP rank {s.tp_rank} of {s.tp_degree}" for s in kept)
    return f"standby with {shards}"


def _shape(replica: Replica) -> str:
    degrees = set(replica.shape)
    tensor = str(degrees.pop()) if len(degrees) == 1 else "/".join(map(str, replica.shape))
    return f"PP{len(replica.stages)} TP{tensor}"


def _layers(replica: Replica) -> str:
    """How many layers each stage runs, such as "5+4" for a stage with several chunks."""
    if not replica.chunks:
        return "the job's own"
    counts = [[c.end - c.first for c in replica.chunks if c.stage == stage] for stage in range(len(replica.stages))]
    return ", ".join("+".join(map(str, of_stage)) for of_stage in counts)


def _dealt(plan: ParallelPlan) -> str:
    """How many of a layer's experts each of those that share them has, where their numbers differ."""
    if not plan.uneven_experts:
        return "in equal numbers"
    counts = even_counts(plan.uneven_experts, plan.expert_parallel)
    return f"as {' '.join(map(str, counts))}" if len(counts) <= 8 else f"as {counts[0]} or {counts[-1]} each"


def _ranges(indices: tuple[int, ...]) -> str:
    """ "8 (0 1 2 …)": how many indices, and which; long lists omit the middle."""
    shown = [*map(str, indices)] if len(indices) <= 8 else [*map(str, indices[:4]), "…", *map(str, indices[-2:])]
    return f"{len(indices)} ({' '.join(shown)})"
