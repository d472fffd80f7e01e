# SPDX-License-Identifier: Apache-2.0
"""A device that does not let go of a broken epoch, or faults, is given up: its worker dies, and the others go on.

An error would end the job instead. May import `control` and `executor`.
"""

from collections.abc import Callable
from typing import Final

from megatron_resihp import cpu
from megatron_resihp.control.linux import die
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.executor.groups.errors import HARDWARE, device_fault, fault_of_device, is_communicator_error
from megatron_resihp.executor.nccl.aborts import DeviceLost

NOTICE_S: Final = 5.0
"""How long the notice of a death may come later than its effect on the device."""


def abort_or_die(abort: Callable[[], None]) -> None:
    """Abort an epoch's communicators, from any thread."""
    try:
        abort()
    except DeviceLost as error:
        die(str(error))


def die_of_fault(
    control: WorkerControl, error: BaseException, recovering: bool, blame: Callable[[], None] | None
) -> None:
    """Die of a fault of the device, unless it is the program's own error; then, and of other errors, this returns.

    A survivor may fault as it reads the memory of a dead peer, which NCCL maps into its own (`NCCL_CUMEM_ENABLE`,
    NVLS). It may notice that late, since work is queued: in the next epoch, on its way there or in its first step. What
    is broken about the device itself is never the program's error.

    Args:
        recovering: whether no step has been taken since the last epoch broke or was left.
        blame: tells the coordinator that a plan is on trial, which may be why; None: it isn't.
    """
    code = device_fault(error)
    if code is None and isinstance(error, RuntimeError) and not is_communicator_error(error):
        code = fault_of_device()  # libraries have words of their own for it
    if code is None:
        return
    what = f"CUDA {code}: {str(error).splitlines()[0]}"
    if code in HARDWARE:
        die(f"the device has failed ({what})")
    if recovering or control.heard.await_broken(NOTICE_S):
        if blame is not None:
            blame()  # before another worker faults under it
        die(f"the device faulted in a broken epoch or in the first step after one ({what})")


def comes_of_a_break(control: WorkerControl, backend: str) -> bool:
    """Whether an error or a result of this worker may be due to the end of its epoch.

    NCCL ends an aborted collective without its result, and what is queued behind it goes on with what was there. So may
    a peer, which passes on what it makes of that before this worker has heard of anything. Gloo raises instead.

    Args:
        backend: `--distributed-backend`.
    """
    if backend == "nccl" and not cpu.installed():
        return control.heard.await_broken(NOTICE_S)
    return control.heard.broken()
