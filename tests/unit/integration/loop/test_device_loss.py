# SPDX-License-Identifier: Apache-2.0
"""Which devices are given up, so that the other workers go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.executor.groups.errors import HARDWARE, is_communicator_error
from megatron_resihp.executor.nccl.aborts import DeviceLost
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


def control(broken: bool) -> Any:
    return SimpleNamespace(heard=SimpleNamespace(await_broken=lambda timeout_s: broken))


def raised_from(cause: Exception, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


def raised_while(first: Exception, error: Exception) -> Exception:
    error.__context__ = first
    return error


FAULT = cuda_error(ILLEGAL_ADDRESS)
FAULTS = {
    "its code": FAULT,
    "in words": RuntimeError("/te/common/util/cuda_runtime.cpp:20: CUDA Error: unspecified launch failure"),
    "an assertion": RuntimeError("CUDA error: device-side assert triggered"),
    "NCCL's words": dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error, NCCL version 2.30.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal access'"
    ),
    "cuBLAS's words": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    "Transformer Engine's words": RuntimeError(
        "/te/common/gemm/cublaslt_gemm.cu:750 in function cublas_gemm: cuBLAS Error: the function failed to launch on "
        "the GPU"
    ),
    "cuDNN's words": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "as its cause": raised_from(FAULT, dist.DistError("a tensor could not cross between devices")),
    "dealt with": raised_while(FAULT, KeyError("text")),
}
OTHERS = {
    "another error of the device": cuda_error(OUT_OF_RESOURCES),
    "no error of the device": RuntimeError("shapes cannot be multiplied: misaligned address"),
    "memory": RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"),
    "no runtime error": ValueError("CUDA error: device-side assert triggered"),
}


@pytest.mark.parametrize("error", FAULTS.values(), ids=FAULTS)
def test_a_device_that_faults_in_a_broken_epoch(error: Exception) -> None:
    """A survivor may have read the memory of a peer that has died."""
    with pytest.raises(Died, match="faulted in a broken epoch"):
        device_loss.die_of_fault(control(broken=True), error, recovering=False, blame=None)


@pytest.mark.parametrize("error", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_is_noticed_late(error: Exception) -> None:
    """The new epoch isn't broken, but no step has been taken in it: the fault is of the old one's work."""
    with pytest.raises(Died, match="faulted"):
        device_loss.die_of_fault(control(broken=False), error, recovering=True, blame=None)


@pytest.mark.parametrize("error", FAULTS.values(), ids=FAULTS)
def test_a_programs_own_fault(error: Exception) -> None:
    """No link has failed, so nobody is asked for another try."""
    device_loss.die_of_fault(control(broken=False), error, recovering=False, blame=None)
    assert not is_communicator_error(error)


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_an_error_that_is_no_fault(error: Exception) -> None:
    device_loss.die_of_fault(control(broken=True), error, recovering=True, blame=None)


class Stream:
    """Of a device that has failed."""

    def query(self) -> bool:
        raise FAULT


def test_a_fault_that_a_library_tells_in_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the device is asked; but not for errors of communicators, which are told of anyhow, or of Python."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    with pytest.raises(Died, match="CUDA 700: no words for it"):
        device_loss.die_of_fault(control(broken=True), RuntimeError("no words for it"), recovering=False, blame=None)
    for error in (dist.DistBackendError("gloo: connection closed by peer"), KeyError("text")):
        device_loss.die_of_fault(control(broken=True), error, recovering=True, blame=None)


@pytest.mark.parametrize("code", sorted(HARDWARE))
def test_a_device_that_is_broken(code: int) -> None:
    """Whatever the epoch is: no program can cause that, and another device can do its work."""
    with pytest.raises(Died, match=f"device has failed .CUDA {code}"):
        device_loss.die_of_fault(control(broken=False), cuda_error(code), recovering=False, blame=None)


def test_a_plan_under_which_a_device_faults() -> None:
    """Others would fault under it too, so it is blamed first; a broken device is not the plan's doing."""
    blamed: list[str] = []
    with pytest.raises(Died):
        device_loss.die_of_fault(control(broken=False), FAULT, recovering=True, blame=lambda: blamed.append("plan"))
    assert blamed == ["plan"]
    with pytest.raises(Died):
        device_loss.die_of_fault(control(broken=False), cuda_error(214), recovering=True, blame=pytest.fail)


def test_a_device_that_does_not_let_go() -> None:
    def abort() -> None:
        raise DeviceLost("NCCL groups 3 could not be aborted within 10 s")

    with pytest.raises(Died, match="groups 3 could not be aborted"):
        device_loss.abort_or_die(abort)
    device_loss.abort_or_die(lambda: None)
