# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/throughput.py makes of a job's events, and which jobs and plans it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import throughput
from common import add_part, of_part
from throughput import Measured
from throughput_jobs import FAMILIES, Case, Family

from megatron_resihp.cost.memory import check_plan
from megatron_resihp.planner.evaluation import evaluate

SHARERS = ("moe", "long")


def test_what_is_not_simulated_is_taken_from_the_fault_free_iterations() -> None:
    """A second in each iteration that no prediction holds is no error, and no more than that is forgiven."""
    healthy = Measured(iteration_s=5.0, iterations=2, predicted_s=4.0)
    for measured_s, error in ((9.0, 0.0), (9.9, 10.0), (8.1, 10.0)):
        own = Measured(iteration_s=measured_s, iterations=2, predicted_s=8.0)
        assert own.after(healthy).simulator_error_percent == pytest.approx(error)


def test_a_plan_that_cannot_be_run_gets_what_fault_free_iterations_really_took_longer() -> None:
    family = FAMILIES["moe"]
    cost, health = family.cost(0.5, family.cases[0]), Case("").health(8)
    simulated = evaluate(family.own_plan, health, cost)
    found = Measured(5.0, 2, 4.0).of_another(simulated)
    assert found.iterations == 0
    assert found.iteration_s == simulated.iteration_s + 1.0 and found.predicted_s == simulated.iteration_s


def test_parts_have_each_case_once() -> None:
    cases = FAMILIES["moe"].cases
    parts = [of_part(cases, (number, 3)) for number in (1, 2, 3)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in cases)


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b"])
def test_a_part_that_there_is_not(capsys: pytest.CaptureFixture[str], part: str) -> None:
    parser = argparse.ArgumentParser()
    add_part(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--part", part])
    assert f"{part} is no part; give I/N" in capsys.readouterr().err


def test_a_finished_case_is_not_run_again_and_a_failed_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, case = FAMILIES["long"], FAMILIES["long"].cases[0]
    kept = throughput.kept_at(tmp_path, "long", case, 0.5)
    assert kept is not None and kept != throughput.kept_at(tmp_path, "long", case, 1.0)
    runs = []

    def run_case(family: Family, case: Case, time_scale: float, directory: Path) -> dict[str, float]:
        runs.append(case.name)
        if len(runs) == 1:
            raise RuntimeError("the job failed")
        return {"share_of_bound": 0.9}

    monkeypatch.setattr(throughput, "run_case", run_case)
    assert throughput.figures_of(family, case, 0.5, kept, tmp_path) == {"error": "the job failed"}
    for _ in range(2):
        assert throughput.figures_of(family, case, 0.5, kept, tmp_path)["share_of_bound"] == 0.9
    assert len(runs) == 2 and json.loads(kept.read_text())["share_of_bound"] == 0.9


@pytest.mark.parametrize("name", SHARERS)
def test_cases_are_those_of_the_documentation(name: str) -> None:
    """A group that shares is a node; two that die together are of one group."""
    family = FAMILIES[name]
    together = family.own_plan.sharing.together
    assert together == 4
    for case in family.cases:
        assert family.own_plan.members == tuple(range(8))
        if "dead node" in case.name:
            assert len(case.dead) == together and len({worker // together for worker in case.dead}) == 1
        elif len(case.dead) > 1:
            assert len({worker // together for worker in case.dead}) == 1


@pytest.mark.parametrize("name", SHARERS)
def test_joint_plans_all_cases_and_shares_where_memory_wants_it(name: str) -> None:
    family = FAMILIES[name]
    for case in family.cases:
        cost, health = family.cost(0.5, case), case.health(8)
        plan = throughput.plans_of(family, case, cost)["joint"]
        check_plan(plan, cost.model, cost.training, cost.device.memory)
        assert plan.sharing.together >= case.sharers
        if case.sharers == 1:
            assert evaluate(plan, health, cost).share_of_bound > 0.93


def test_lazarus_is_simulated_where_its_plan_says_less_than_it_means() -> None:
    family = FAMILIES["moe"]
    asked = {}
    for case in family.cases[:5:4]:
        cost, health = family.cost(0.5, case), case.health(8)
        plan = throughput.plans_of(family, case, cost)["lazarus"]
        asked[case.sharers] = throughput.can_be_run(family, "lazarus", plan, health, cost)
    assert asked == {1: True, 2: False}


def test_equal_plans_are_asked_for_once() -> None:
    family = FAMILIES["moe"]
    case = family.cases[0]
    plans = throughput.plans_of(family, case, family.cost(0.5, case))
    assert list(throughput.to_ask(family, plans)) == ["drop-replica", "restart", "joint"]
    slow = family.cases[2]
    plans = throughput.plans_of(family, slow, family.cost(0.5, slow))
    assert list(throughput.to_ask(family, plans)) == ["joint", "lazarus"], "the others keep the job's own plan"
