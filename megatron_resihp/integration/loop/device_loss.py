# SPDX-License-Identifier: Apache-2.0
"""A device that does not let go of a broken epoch, or fails in it, is given up: its worker dies, and the others go on.

An error would end the job instead. May import `control` and `executor`.
"""

from collections.abc import Callable
from typing import Final

from megatron_resihp.control.linux import die
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.executor.nccl.aborts import DeviceStuck

FAULTS: Final = frozenset({700, 719})
"""CUDA's codes of an illegal access and of a failed launch. A survivor may get one when it reads memory of a dead peer,
which NCCL maps into its own (`NCCL_CUMEM_ENABLE`, NVLS)."""
NOTICE_S: Final = 5.0
"""How long the notice of a death may come later than its effect on the device."""


def abort_or_die(abort: Callable[[], None]) -> None:
    """Abort an epoch's communicators, from any thread."""
    try:
        abort()
    except DeviceStuck as error:
        die(str(error))


def die_of_fault(control: WorkerControl, error: BaseException) -> None:
    """Die where a device has faulted in an epoch that is broken, or is marked as broken soon; else it is the program's
    own error, and this returns."""
    if getattr(error, "error_code", None) in FAULTS and control.heard.await_broken(NOTICE_S):
        die(f"the device faulted in a broken epoch ({str(error).splitlines()[0]})")
