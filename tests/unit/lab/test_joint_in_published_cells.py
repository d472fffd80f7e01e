"""In the published experiments no other strategy does better than `joint`: throughput of whole sessions."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.lab import published

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LARGE = ("llama2-70b", "qwen2.5-72b")
ALLOWED = 0.005
"""Share of the throughput of the best of the others by which `joint` may stay behind."""


def every_cell() -> list[Any]:
    """Model, micro-batches, experiment and case; all but two of the smallest are for the night."""
    severities = [*itertools.product(("fail-slow", "mixed"), published.SEVERITIES)]
    cases = [("fail-stop", case) for case in ("2 h", "1 h", "0.5 h")] + severities
    cells = [(model, count, *case) for count in (16, 64) for model in published.models() for case in cases]
    cells += [(model, count, "256 GPUs", "with rejoins") for count in (16, 64) for model in LARGE]
    daily = {("llama2-7b", 16, "fail-slow", "medium"), ("llama2-7b", 64, "fail-stop", "2 h")}
    return [pytest.param(*cell, marks=[] if cell in daily else [pytest.mark.nightly]) for cell in cells]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "micro_batches", "experiment", "case"), every_cell())
def test_no_strategy_trains_more(
    model: str, micro_batches: int, experiment: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cells = importlib.import_module("published_cells")
    sizes = published.job(model, micro_batches)
    cell = cells.Cell(model, micro_batches, experiment, case)
    table, _ = cells.measure(cell, sizes, published.judge_of(sizes), 1.0, cells.Settings(orders=1))
    rates = {name: row["samples_per_s"] for name, row in table.items() if name != cells.FREE}
    ours = rates.pop(cells.OURS)
    best = max(rates, key=lambda name: rates[name])
    assert ours >= (1 - ALLOWED) * rates[best], f"{best} trains {rates[best]:.3f} samples/s, joint {ours:.3f}"
