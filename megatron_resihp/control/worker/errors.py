# SPDX-License-Identifier: Apache-2.0
"""How an epoch or the job ends for a worker. May import `control.exit_codes`."""

from megatron_resihp.control import exit_codes


class EpochBroken(Exception):
    """The control plane has marked the epoch as broken."""


class UnreachableError(RuntimeError):
    """A member of the plan can't be reached, which counts as a communication error."""


class JobEnded(Exception):
    """The job is over for this worker; `code` is the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class CoordinatorLost(JobEnded):
    """No coordinator can say how the job goes on: a worker that holds state saves it (`integration.loop.last_save`)."""

    def __init__(self, why: str) -> None:
        super().__init__(exit_codes.RETRY, f"the coordinator is gone: {why}")
