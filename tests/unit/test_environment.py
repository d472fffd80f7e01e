"""The environment that workers are started with."""

from __future__ import annotations

from pathlib import Path

from megatron_resihp.control.address import Address
from megatron_resihp.control.environment import JobEnvironment

STORE = Address("localhost", 1)


def test_what_recovery_needs_of_nccl_is_no_choice_of_the_user() -> None:
    """torch's own defaults end survivors; a user's other settings stay."""
    job = JobEnvironment(
        node=0, nodes=1, workers_per_node=2, store=STORE, run_dir=Path("run"), heartbeat_s=1.0, stand_in=False
    )
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    found = job.of(1, 3, 4, inherited)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_DIST_USE_NCCL2"] == "0"
    assert (found["NCCL_DEBUG"], found["OMP_NUM_THREADS"]) == ("INFO", "4")
