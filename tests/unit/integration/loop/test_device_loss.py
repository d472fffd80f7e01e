# SPDX-License-Identifier: Apache-2.0
"""Which devices are given up, so that the other workers go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.executor.nccl.aborts import DeviceStuck
from megatron_resihp.integration.loop import device_loss

ILLEGAL_ADDRESS, OUT_OF_RESOURCES = 700, 701


class Died(BaseException):
    """In place of the end of the process."""


@pytest.fixture(autouse=True)
def death(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(reason: str) -> None:
        raise Died(reason)

    monkeypatch.setattr(device_loss, "die", die)


def cuda_error(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    error.error_code = code  # as torch does
    return error


@pytest.mark.parametrize(
    ("error", "broken", "dies"),
    (
        (cuda_error(ILLEGAL_ADDRESS), True, True),
        (cuda_error(ILLEGAL_ADDRESS), False, False),
        (cuda_error(OUT_OF_RESOURCES), True, False),
        (RuntimeError("shapes cannot be multiplied"), True, False),
    ),
    ids=("broken epoch", "the program's own", "another error of the device", "no error of the device"),
)
def test_a_device_that_faults(error: Exception, broken: bool, dies: bool) -> None:
    """A survivor may have read the memory of a peer that has died."""
    control: Any = SimpleNamespace(heard=SimpleNamespace(await_broken=lambda timeout_s: broken))
    if dies:
        with pytest.raises(Died, match="faulted in a broken epoch"):
            device_loss.die_of_fault(control, error)
    else:
        device_loss.die_of_fault(control, error)


def test_a_device_that_does_not_let_go() -> None:
    def abort() -> None:
        raise DeviceStuck("NCCL groups 3 could not be aborted within 10 s")

    with pytest.raises(Died, match="groups 3 could not be aborted"):
        device_loss.abort_or_die(abort)
    device_loss.abort_or_die(lambda: None)
