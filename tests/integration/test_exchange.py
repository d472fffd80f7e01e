# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose stages differ in tensor-parallel degree, in real processes: as one process would compute it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import toy_pipeline
from toy_pipeline import DTYPE, HIDDEN, MICRO_BATCH, WIDE, WORKERS, Case, Members, ToyWork

TIMEOUT_S = 120
CASES = toy_pipeline.cases() | toy_pipeline.beside() | toy_pipeline.between_devices()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each worker wrote down of each case."""
    directory = tmp_path_factory.mktemp("toy")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)
    }  # fmt: skip
    command = [sys.executable, toy_pipeline.__file__, str(directory)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        assert process.wait(TIMEOUT_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [torch.load(directory / f"{worker}.pt") for worker in range(WORKERS)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_losses_are_those_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    case = CASES[name]
    expected = alone(case)
    results = [worker[name] for worker in found if worker[name] is not None]
    for layer, gradients in expected.gradients.items():
        for number, (shape, dim) in enumerate((((HIDDEN, WIDE), 1), ((WIDE, HIDDEN), 0))):
            total = torch.zeros(shape, dtype=DTYPE)
            for result in results:
                place = Members(result["rank"], result["degree"], False, None).part(total, dim)
                place += result["gradients"][layer][number]
            torch.testing.assert_close(total, gradients[number])
    for micro_batch, loss in expected.losses.items():
        parts = [result["losses"][micro_batch] for result in results if micro_batch in result["losses"]]
        torch.testing.assert_close(torch.stack(parts).sum(), loss)


@pytest.mark.parametrize("name", CASES)
def test_one_copy_crosses(name: str, found: list[dict[str, Any]]) -> None:
    case = CASES[name]
    results = [worker[name] for worker in found if worker[name] is not None]
    messages = {message for result in results for message in result["messages"]}
    assert messages
    whole = case.tokens * MICRO_BATCH * HIDDEN * DTYPE.itemsize
    assert sum(result["bytes"] for result in results) == len(messages) * whole


def test_a_wait_ends_with_the_epoch(found: list[dict[str, Any]]) -> None:
    assert [worker["waits forever"] for worker in found] == [False] * WORKERS


def alone(case: Case) -> ToyWork:
    """The same network on one worker, one chunk after the other."""
    chunks = case.plan.replicas[0].chunks
    work = ToyWork(chunks, Members(0, 1, False, None), case.tokens, splits_backward=False)
    for micro_batch in range(case.plan.micro_batch_count):
        tensor = None
        for chunk in range(len(chunks)):
            tensor = work.forward(chunk, micro_batch, tensor if tensor is None else tensor.detach().requires_grad_())
        gradient = None
        for chunk in reversed(range(len(chunks))):
            gradient = work.backward(chunk, micro_batch, gradient)
    return work
