# SPDX-License-Identifier: Apache-2.0
"""Recorded jobs of others, where RESIHP_TRACES names their directory: the right worker is named and nobody else."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

TRACES = Path(os.environ.get("RESIHP_TRACES") or "no-such-directory")


@pytest.fixture(scope="module")
def traces_benchmark(repository: Path) -> ModuleType:
    if not TRACES.is_dir():
        pytest.skip("recorded jobs are left out: RESIHP_TRACES does not name their directory")
    pytest.importorskip("pyarrow")
    spec = importlib.util.spec_from_file_location("traces", repository / "benchmarks" / "traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["traces"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("job", "culprits"), [("AR", [0]), ("ST", []), ("SE", [])])
def test_the_slow_worker_is_named_and_no_other(traces_benchmark: ModuleType, job: str, culprits: list[int]) -> None:
    assert traces_benchmark.judge_bytedance(TRACES, job)["named"] == culprits


def test_a_straggler_that_develops_is_found(traces_benchmark: ModuleType) -> None:
    onsets = traces_benchmark.judge_pai(TRACES, 1)["onsets"]
    assert [workers for at, *workers in onsets if 181 <= at <= 195] == [[6]]
