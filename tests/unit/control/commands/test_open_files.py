# SPDX-License-Identifier: Apache-2.0
"""Whether a launcher may open as many files as it will."""

from __future__ import annotations

import resource

import pytest

from megatron_resihp.control.commands.launch import open_files
from megatron_resihp.control.commands.launch.launch_options import LaunchOptions
from megatron_resihp.control.commands.launch.launcher import launch
from megatron_resihp.control.job_size import JobSize


def test_a_large_job_needs_more_than_the_usual_limit() -> None:
    assert open_files.problem(JobSize(16, 8), 0, 1024) is None
    problem = open_files.problem(JobSize(256, 8), 0, 1024)
    assert problem is not None and "\n" not in problem
    assert "--nnodes 256 --nproc-per-node 8" in problem and str(open_files.needed(JobSize(256, 8), 0)) in problem
    assert open_files.problem(JobSize(256, 8), 1, 1024) is None, "only node 0 serves the others"
    assert open_files.problem(JobSize(256, 8), 0, resource.RLIM_INFINITY) is None


def test_nodes_that_may_join_count() -> None:
    assert open_files.needed(JobSize(2, 8, late_nodes=2), 0) == open_files.needed(JobSize(4, 8), 0)


def test_the_limit_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda what, limits: given.append(limits))
    assert open_files.allow_as_many_as_may_be() == 4096
    assert given == [(4096, 4096)]


def test_a_launch_that_would_run_out_of_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda what: (64, 64))
    assert launch(LaunchOptions(command=(__file__,), workers_per_node=2)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("resihp: node 0's launcher") and "may open 64; raise the hard limit" in line
