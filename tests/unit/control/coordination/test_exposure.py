# SPDX-License-Identifier: Apache-2.0
"""What is said at the start of single losses that would end the job."""

from __future__ import annotations

import pytest

from megatron_resihp.control.coordination.exposure import Exposure, exposure, in_words
from megatron_resihp.planner import JobShape


def said(workers: int, tensor: int, pipeline: int, nodes: int, **how: bool) -> tuple[Exposure, str]:
    shape = JobShape(tensor, pipeline, 64, workers // nodes)
    found = exposure(shape, workers, **{"pipeline_last": True, "shared_optimizer": False, **how})
    return found, in_words(nodes, found)


def test_stages_of_neighbours_on_one_node_are_lost_with_it() -> None:
    """Two nodes of eight, TP 4 x PP 2: in Megatron's own order each node holds one stage of both replicas."""
    found, line = said(16, 4, 2, 2)
    assert found == Exposure((1,), (), "start it with --use-tp-pp-dp-mapping")
    assert line == (
        "losing node 0 (the coordinator's) or node 1 ends the job with state that is nowhere else; to mend that, start "
        "it with --use-tp-pp-dp-mapping"
    )
    found, line = said(16, 4, 2, 2, pipeline_last=False)
    assert found == Exposure((), ())
    assert line == "losing node 0 (the coordinator's) ends the job; any other one may be lost"


def test_copies_of_a_shared_optimizer_may_be_on_the_same_node() -> None:
    """Two replicas on each node, and each part's copy with the neighbour."""
    found, _ = said(16, 2, 2, 2, pipeline_last=False, shared_optimizer=True)
    assert found.nodes == (1,) and found.mend == "start it without --use-distributed-optimizer"
    assert not said(16, 2, 2, 2, pipeline_last=False)[0].nodes


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_replica_outlives_no_loss(nodes: int) -> None:
    found, line = said(4, 2, 2, nodes)
    assert found.workers == (0, 1, 2, 3) and found.nodes == tuple(range(1, nodes))
    assert line.endswith("; to mend that, give it the workers of two replicas, or fewer stages")


def test_a_job_of_one_node() -> None:
    assert said(8, 2, 2, 1)[1] == "any one worker may be lost"
