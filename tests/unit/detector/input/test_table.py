# SPDX-License-Identifier: Apache-2.0
"""Tables of iteration times: what a file says is what is judged, and what it cannot mean is told."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron_resihp.detector.input.table import Table, TableError, read


def table(tmp_path: Path, text: str, name: str = "times.csv") -> Table:
    path = tmp_path / name
    path.write_text(text)
    return read(path)


def numbered(*numbers: int) -> str:
    return "iteration,seconds\n" + "".join(f"{number},0.5\n" for number in numbers)


def test_numbers_that_begin_anew_start_a_segment_and_lose_no_row(tmp_path: Path) -> None:
    found = table(tmp_path, numbered(*range(1, 41), *range(31, 61), *range(1, 11)))
    assert found.iterations.tolist() == [*range(1, 41), *range(31, 61), *range(1, 11)]
    assert found.segments.tolist() == [0] * 40 + [1] * 30 + [2] * 10
    assert found.restarts == [41, 71]
    assert found.left_out == ()


def test_each_worker_has_its_own_rows_and_all_restart_together(tmp_path: Path) -> None:
    rows = [(number, worker) for worker in (3, 7) for number in (*range(1, 31), *range(21, 41))]
    text = "iteration,worker,seconds\n" + "".join(f"{number},{worker},{worker}.5\n" for number, worker in rows)
    found = table(tmp_path, text)
    assert found.workers.tolist() == [3, 7]
    assert found.seconds.shape == (50, 2)
    assert (found.seconds == [3.5, 7.5]).all()
    assert found.segments.tolist() == [0] * 30 + [1] * 20


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    found = table(tmp_path, numbered(*np.random.default_rng(0).permutation(100).tolist()))
    assert found.iterations.tolist() == list(range(100))
    assert found.restarts == []


def test_several_rows_an_iteration_without_a_worker_are_left_out_and_told(tmp_path: Path) -> None:
    found = table(tmp_path, numbered(*np.repeat(np.arange(1, 21), 2).tolist()))
    assert found.iterations.tolist() == list(range(1, 21))
    assert len(found.left_out) == 20
    assert "need a column `worker`" in found.left_out[0]


@pytest.mark.parametrize("worker", ["", ",0"])
def test_iterations_have_the_numbers_of_their_rows_whatever_is_left_out(tmp_path: Path, worker: str) -> None:
    head = "seconds,worker\n" if worker else "seconds\n"
    found = table(tmp_path, head + "".join(f"{value}{worker}\n" for value in (0.5, "x", -1, 0.6, "nan", 0.7)))
    assert found.iterations.tolist() == [1, 4, 6]
    assert found.rows.tolist() == [1, 4, 6]
    assert [line.split(":")[0] for line in found.left_out] == ["line 3", "line 4", "line 6"]


def test_numbers_that_are_no_times_are_left_out_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = table(tmp_path, "seconds,tokens\n1e308,1\n1e-308,1\n0.5,1e308\ninf,1\n0.5,8192\n0.5,1e-308\n")
    assert found.iterations.tolist() == [5]
    assert len(found.left_out) == 5


def test_json_lines_are_read_like_rows(tmp_path: Path) -> None:
    found = table(tmp_path, '{"seconds": 0.5}\nnonsense\n{"seconds": 1, "tokens": 3}\n[]\n', "times.jsonl")
    assert found.seconds[:, 0].tolist() == [0.5, 1.0]
    assert math.isnan(found.tokens[0, 0])
    assert found.tokens[1, 0] == 3
    assert len(found.left_out) == 2


def test_a_file_without_times_says_why(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="line 2: seconds is '1e308', not a positive number from 1e-09"):
        table(tmp_path, "seconds\n1e308\n")
