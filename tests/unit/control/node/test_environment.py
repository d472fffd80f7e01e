# SPDX-License-Identifier: Apache-2.0
"""The environment that workers are started with."""

from __future__ import annotations

from pathlib import Path

from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.node.environment import JobEnvironment, overruled, warnings_of
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.secret import fresh_secret

STORE, SECRET = Address("localhost", 1), fresh_secret()


def test_a_worker_that_was_not_there_at_the_start_has_a_rank_of_the_first_world() -> None:
    """With that Megatron starts; the worker's id tells it from who has the rank."""
    job = JobEnvironment(
        node=2,
        size=JobSize(2, 2, late_nodes=1),
        store=STORE,
        secret=SECRET,
        run_dir=Path("run"),
        heartbeat_s=1.0,
        stand_in=False,
    )
    for worker, rank, local_rank in ((4, "0", "0"), (5, "1", "1"), (11, "1", "1")):
        found = job.of(worker, 3, 4, {})
        assert (found["RESIHP_WORKER"], found["RANK"], found["LOCAL_RANK"]) == (str(worker), rank, local_rank)
        assert (found["WORLD_SIZE"], found["RESIHP_SLOTS"]) == ("4", "6")


def test_what_recovery_needs_of_nccl_is_no_choice_of_the_user() -> None:
    """torch's own defaults end survivors; a user's other settings stay."""
    job = JobEnvironment(
        node=0, size=JobSize(1, 2), store=STORE, secret=SECRET, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False
    )
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    found = job.of(1, 3, 4, inherited)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_DIST_USE_NCCL2"] == "0"
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "4")


def test_settings_that_recovery_suffers_from() -> None:
    """A user may have a reason for them, so they stay; but nobody should learn of it from a lost job."""
    assert warnings_of({"NCCL_CUMEM_ENABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"}) == []
    (warning,) = warnings_of({"NCCL_CUMEM_ENABLE": "0"})
    assert warning == "NCCL_CUMEM_ENABLE=0: survivors may fault on the memory of a dead peer, and die with it; unset it"


def test_older_names_count_where_the_newer_is_not_set() -> None:
    """As torch reads them."""
    assert warnings_of({"NCCL_DESYNC_DEBUG": "1"}) == [
        "NCCL_DESYNC_DEBUG=1: torch may end survivors when a peer dies; unset it"
    ]
    assert warnings_of({"NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DESYNC_DEBUG": "0"}) == []


def test_what_is_overruled_is_said() -> None:
    assert overruled({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "INFO"}) == []
    assert overruled({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "3"}) == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 becomes 0: recovery needs it; unset it"
    ]
