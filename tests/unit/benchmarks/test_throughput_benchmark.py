# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmarks/throughput.py, from what a job has measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DIRECTORY = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DIRECTORY))
    spec = importlib.util.spec_from_file_location("throughput", DIRECTORY / "throughput.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "throughput", module)
    spec.loader.exec_module(module)
    return module


def test_what_is_not_simulated_is_taken_from_the_fault_free_iterations(throughput: ModuleType) -> None:
    """A second in each iteration that no prediction holds is no error, and no more than that is forgiven."""
    healthy = throughput.Measured(iteration_s=5.0, iterations=2, predicted_s=4.0)
    for measured_s, error in ((9.0, 0.0), (9.9, 10.0), (8.1, 10.0)):
        own = throughput.Measured(iteration_s=measured_s, iterations=2, predicted_s=8.0)
        assert own.after(healthy).simulator_error_percent == pytest.approx(error)
