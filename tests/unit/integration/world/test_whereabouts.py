# SPDX-License-Identifier: Apache-2.0
"""Which of a machine's GPUs a worker has."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from megatron_resihp.integration.world.whereabouts import index_of


def test_the_driver_knows_best(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-6": 6}.__getitem__,
        nvmlDeviceGetIndex=lambda handle: handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert index_of(0, {"CUDA_VISIBLE_DEVICES": "GPU-6"}, "GPU-6") == 6
    assert index_of(0, {"CUDA_VISIBLE_DEVICES": "5"}, "GPU-7") == 5, "of a device that the driver does not know"


@pytest.mark.parametrize(
    ("visible", "number", "index"), [(None, 3, 3), ("4,5,6,7", 1, 5), ("4", 1, None), ("GPU-a,GPU-b", 1, None)]
)
def test_else_the_environment_tells(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int, index: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert index_of(number, variables, "GPU-c") == index
