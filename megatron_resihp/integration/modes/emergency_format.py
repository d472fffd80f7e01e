# SPDX-License-Identifier: Apache-2.0
"""How an emergency checkpoint of a job may be written, whatever plan it ran. May import this package."""

from typing import Any

from megatron_resihp.integration.job import Job
from megatron_resihp.integration.state.reshardable import RESHARDABLE, TYPE


def has_files_by_stage(job: Job) -> bool:
    """Whether Megatron's files of a stage and TP rank can hold the state.

    In that format its distributed optimizer has buffers whose order and padding depend on the job. Where replicas share
    experts, each of them has a file of its own there, also where a plan gives all experts to each.
    """
    return not job.shares_optimizer and not job.own.shares_experts


def whole_metadata(job: Job) -> dict[str, Any]:
    """What a checkpoint's metadata says of whole optimizer states, besides Megatron's. Empty: nothing."""
    # A distributed optimizer can load what is saved.
    return {TYPE: RESHARDABLE} if job.shares_optimizer else {}
