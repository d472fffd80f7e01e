"""Fifty recoveries in one job leave nothing behind: groups, threads, file descriptors and memory stay as they were."""

from __future__ import annotations

from jobs import Job, Jobs, check_training, tiny

RECOVERIES = 50
FIRST = 2
"""Iteration of the first recovery."""
POINTS = ("forward", "backward", "p2p", "grad-sync", "norm")
"""Where it strikes, in turn: gloo loses other operations where peers are connected than where they are not yet. All lie
before the agreement, which nobody passes alone; after it the next drill might strike in the same epoch."""
SETTLED = 10
"""Recoveries after which caches are warm; later ones may not add anything."""
MEMORY_TOLERANCE = 1.05


def final_state(job: Job) -> dict[int, str]:
    """The digest of parameters and moments that each worker ended with."""
    return {event["worker"]: event["digests"] for event in job.events("digest")}


def test_fifty_recoveries_leave_nothing_behind(jobs: Jobs) -> None:
    """Groups are rebuilt without a loss: a drill lets one worker after another report a communication error."""
    iterations = FIRST + RECOVERIES + 1
    arguments = tiny(train_iters=iterations, pipeline_model_parallel_size=2)
    drills = [f"rebuild:{step % 4}@{FIRST + step}:{POINTS[step % len(POINTS)]}" for step in range(RECOVERIES)]
    reference = jobs.reference(arguments, workers=4)
    job = jobs.start([*arguments, "--resihp-drill", *drills], workers=4).wait(180.0)

    assert len(job.events("recovery")) == RECOVERIES
    check_training(job, reference)
    # The layout is the reference's throughout, so not one bit of the state may differ.
    assert final_state(job) == final_state(reference)
    for worker in range(4):
        seen = [event for event in job.events("resources") if event["worker"] == worker]
        # Without a death no operation may get lost: it would keep its group and a thread until the group's time-out.
        assert min(event["left_behind"] for event in seen[-SETTLED:]) == 0
        for name in ("groups", "threads", "descriptors"):
            counts = [event[name] for event in seen]
            # Some are seen while they end; what stays would raise the lowest count.
            assert min(counts[-SETTLED:]) <= min(counts[:SETTLED]), f"{name} of worker {worker}: {counts}"
        memory = [round(event["resident_bytes"] / 2**20) for event in seen]
        assert memory[-1] <= MEMORY_TOLERANCE * memory[SETTLED], f"MiB of worker {worker}: {memory}"
