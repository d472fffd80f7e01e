"""The loss of a whole node: its agent dies, and all its workers with it."""

from __future__ import annotations

import socket

from jobs import Jobs, check_training, tiny


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_whole_node_dies(jobs: Jobs) -> None:
    """Two nodes of two workers, a replica each; the second node's agent is killed."""
    arguments = tiny(pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True, train_iters=12)
    reference = jobs.reference(arguments, workers=4)
    coordinator = ["127.0.0.1", free_port()]
    first, second = (jobs.start(arguments, workers=2, nodes=2, node=n, coordinator=coordinator) for n in range(2))
    first.await_event("iteration", iteration=3)
    second.kill()
    check_training(first.wait(), reference)
    assert {death.worker for death in first.summary.deaths} == {2, 3}
