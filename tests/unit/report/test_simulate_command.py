# SPDX-License-Identifier: Apache-2.0
"""`resihp simulate`: a file or a published name in; a table, JSON and a picture out; bad input in one line."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cli import main
from megatron_resihp.cost.device import NETWORK_BANDWIDTH
from megatron_resihp.lab.strategies import FOR_SHARERS as BASELINES
from megatron_resihp.planner.strategies.registry import FOR_SHARERS
from megatron_resihp.simulator.scenario_file import scenario_of

JOB = {"model": "llama2-7b", "tp": 4, "pp": 2, "dp": 2, "micro_batches": 8}
QUICK = ("--strategies", "drop-replica", "restart", "unmitigated")


def simulate(*arguments: Any) -> int:
    return main(["simulate", *map(str, arguments)])


def scenario(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({"job": JOB, "hours": 4} | more))
    return path


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "simulation.json").read_text())
    return found


def test_a_file_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [{"at_h": 1, "dead": [5]}, {"at_h": 2, "slow": [0], "speed": 0.5}, {"at_h": 3, "back": [5]}]
    path = scenario(tmp_path, name="one of each", events=events)
    assert simulate(path, *QUICK, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "one of each" in shown and "16 workers for 4 h" in shown
    found = results(tmp_path / "out")
    assert set(found["strategies"]) == {"drop-replica", "restart", "unmitigated"}
    assert found["capacity"] == pytest.approx(1 - (2 * 1 + 2 * 0.5) / (4 * 16))
    assert 0 < found["strategies"]["drop-replica"]["share_of_capacity"] < 1
    assert found["strategies"]["unmitigated"]["orders"][0]["aborted"]
    assert (tmp_path / "out" / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_jobs_with_experts_and_long_sequences_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {"model": "mixtral-8x7b", "tp": 2, "pp": 4, "dp": 4, "ep": 4, "etp": 1, "micro_batches": 16,
               "sequence_parallel": True, "distributed_optimizer": True,
               "expert_loads": [3, 2, 1, 1, 1, 1, 1, 1]}  # fmt: skip
    sequences = {"model": "llama2-7b", "tp": 2, "pp": 2, "dp": 2, "cp": 2, "micro_batches": 8, "seq_length": 8192,
                 "sequence_parallel": True, "distributed_optimizer": True}  # fmt: skip
    for job in (experts, sequences):
        path = scenario(tmp_path, job=job, events=[{"at_h": 1, "dead": [5]}, {"at_h": 2, "slow": [0], "speed": 0.5}])
        assert simulate(path, "--out", tmp_path / "out") == 0
        found = results(tmp_path / "out")["strategies"]
        assert set(found) == {"unmitigated", *FOR_SHARERS, *BASELINES}
        assert 0 < found["unmitigated"]["share_of_capacity"] < found["by-speed"]["share_of_capacity"] < 1
        assert simulate(path, "--strategies", "joint") == 2
        assert "joint plans no jobs whose replicas share experts or sequences" in capsys.readouterr().err


def test_a_job_that_died_half_way_had_not_all_of_its_capacity(tmp_path: Path) -> None:
    path = scenario(tmp_path, events=[{"at_h": 2, "dead": list(range(16))}])
    assert simulate(path, *QUICK, "--out", tmp_path / "out") == 0
    found = results(tmp_path / "out")
    assert found["capacity"] == pytest.approx(0.5)
    assert found["strategies"]["drop-replica"]["share_of_capacity"] == pytest.approx(0.5, abs=0.01)


def test_a_published_experiment_is_simulated(tmp_path: Path) -> None:
    name = "fail-stop/llama2-7b/1h"
    assert simulate(name, "--strategies", "drop-replica", "--micro-batches", 16, "--out", tmp_path) == 0
    found = results(tmp_path)
    assert found["healthy_samples_per_s"] == pytest.approx(8.22)
    assert found["capacity"] == pytest.approx(14.5 / 16)


def test_random_failures_are_the_same_by_seed(tmp_path: Path) -> None:
    failures = [
        {"what": "deaths", "poisson_h": 1, "lasting_h": 1},
        {"what": "slow-downs", "weibull_h": 0.5, "speed": [0.4, 0.6]},
        {"what": "slow-links", "every_h": 1},
        {"what": "node-losses", "poisson_h": 3, "lasting_h": 0.5},
    ]
    found = []
    for number, seed in enumerate((3, 3, 4)):
        path = scenario(tmp_path, failures=failures, orders=2, seed=seed)
        assert simulate(path, "--strategies", "drop-replica", "--out", tmp_path / str(number)) == 0
        found.append(results(tmp_path / str(number)))
    assert found[0] == found[1] != found[2]
    assert len(found[0]["strategies"]["drop-replica"]["orders"]) == 2


def test_the_manuals_example_is_a_scenario(repository: Path) -> None:
    text = (repository / "docs" / "planning.md").read_text()
    found = scenario_of(json.loads(text.partition("```json")[2].partition("```")[0]))
    assert len(found.traces) == 3 and found.strategies == ("joint", "oobleck+greyhound") and found.squares


def test_networks_are_as_fast_as_running_jobs_assume() -> None:
    assert scenario_of({"job": JOB}).sizes.device.bandwidth == NETWORK_BANDWIDTH


def test_micro_batches_of_an_iteration_hold_unlike_documents() -> None:
    job = JOB | {"micro_batch_size": 2, "seq_length": 4096}
    squares = np.array(scenario_of({"job": job, "documents": {"long_share": 0.5, "draws": 3}}).squares)
    assert squares.shape == (3, 8)
    assert (squares.std(axis=1) > 0.05 * squares.mean(axis=1)).all()
    assert squares.min() >= 2 * 4096 and squares.max() <= 2 * 4096**2


def test_documents_change_the_speed(tmp_path: Path) -> None:
    healthy = []
    for documents in ({"long_share": 0.0}, {"long_share": 1.0}):
        path = scenario(tmp_path, documents=documents, strategies=["drop-replica"])
        assert simulate(path, "--out", tmp_path / "out") == 0
        found = results(tmp_path / "out")
        assert set(found["strategies"]) == {"drop-replica"}
        healthy.append(found["healthy_samples_per_s"])
    assert healthy[0] > healthy[1]


LARGE = {"model": "llama2-70b", "tp": 4, "pp": 16, "dp": 4, "micro_batches": 64}


def two_dozen_events(workers: int) -> list[dict[str, Any]]:
    """Of a day: every two hours somebody dies or becomes slow, and is back or well again 2.3 h later."""
    events: list[dict[str, Any]] = []
    for number in range(12):
        at_h, worker, slow = 2 * number, (37 * number) % workers, number % 2
        events.append({"at_h": at_h, **({"slow": [worker], "speed": 0.5} if slow else {"dead": [worker]})})
        events.append({"at_h": at_h + 2.3, **({"slow": [worker], "speed": 1} if slow else {"back": [worker]})})
    return events


def test_a_day_of_256_gpus_takes_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About 2 s of one core, once all is compiled."""
    small = scenario(tmp_path, hours=1, events=[{"at_h": 0, "dead": [1]}])
    assert simulate(small, "--strategies", "joint", "--second-step", "never", "--out", tmp_path / "small") == 0
    assert "without its second step" in capsys.readouterr().err
    large = scenario(tmp_path, job=LARGE, hours=24, events=two_dozen_events(256))
    begun = time.process_time()
    assert simulate(large, "--strategies", "joint", "unmitigated", "--out", tmp_path / "out") == 0
    assert time.process_time() - begun < 40
    assert "for 256 workers" in capsys.readouterr().err
    found = results(tmp_path / "out")
    assert not found["joint_second_step"]
    assert found["strategies"]["joint"]["share_of_capacity"] > 0.95
    assert found["strategies"]["joint"]["orders"][0]["plans"] > 10


def test_joint_takes_its_second_step_in_small_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, hours=1)
    assert simulate(path, "--strategies", "joint", "--out", tmp_path) == 0
    assert results(tmp_path)["joint_second_step"] and "second step" not in capsys.readouterr().err
    assert simulate(path, "--strategies", "drop-replica", "--second-step", "never", "--out", tmp_path) == 0
    assert "second step" not in capsys.readouterr().err


@pytest.mark.nightly
def test_joint_plans_for_ten_thousand_workers(tmp_path: Path) -> None:
    job = LARGE | {"tp": 8, "pp": 8, "dp": 160, "micro_batches": 2560}
    events = [{"at_h": 6, "dead": [77]}, {"at_h": 12, "slow": [5000], "speed": 0.5}, {"at_h": 18, "back": [77]}]
    path = scenario(tmp_path, job=job, hours=24, events=events)
    assert simulate(path, "--strategies", "joint", "drop-replica", "--out", tmp_path / "out") == 0
    found = results(tmp_path / "out")["strategies"]
    assert not any(each["orders"][0]["aborted"] for each in found.values())
    assert found["joint"]["orders"][0]["plans"] >= 2
    assert found["joint"]["share_of_capacity"] > max(0.99, found["drop-replica"]["share_of_capacity"])


def test_failures_may_last_for_good(tmp_path: Path) -> None:
    failures = [{"what": "slow-downs", "every_h": 1, "lasting_h": float("inf"), "speed": [0.5, 0.5]}]
    path = scenario(tmp_path, failures=failures)
    assert simulate(path, "--strategies", "unmitigated", "--out", tmp_path / "out") == 0
    # One worker more of 16 at half speed every hour, after the first.
    assert results(tmp_path / "out")["capacity"] == pytest.approx(1 - 0.5 * (1 + 2 + 3) / 4 / 16)


def test_who_has_no_plan_while_all_are_well_starts_from_the_given_one(tmp_path: Path) -> None:
    path = scenario(tmp_path, job=JOB | {"pp": 1, "dp": 1})
    assert simulate(path, "--free", "--strategies", "oobleck", "--out", tmp_path / "out") == 0
    found = results(tmp_path / "out")
    assert found["strategies"]["oobleck"]["samples_per_s"] == pytest.approx(found["healthy_samples_per_s"])


def test_the_table_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(scenario(tmp_path, name="quiet"), *QUICK, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert (tmp_path / "out" / "simulation.txt").read_text(encoding="utf-8") == shown.out
    assert "quiet" in shown.out and "simulation.txt" in shown.err


def test_published_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--list") == 0
    listed = capsys.readouterr().out.split()
    assert "fail-slow/qwen2.5-14b/severe" in listed and "rejoins/llama2-70b" in listed


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate() == 2
    assert "SCENARIO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ({"job": {}}, "job: model is missing; known are llama2-7b, "),
        ({"job": {"modle": "llama2-7b"}}, "job: 'modle' is not known; do you mean model? known are "),
        ({"job": {"model": "lama2-7b"}}, "job: unknown model 'lama2-7b'; do you mean llama2-7b? known are "),
        ({"job": JOB | {"tp": 3}}, "TP groups of 3"),
        ({"job": JOB | {"tp": 0}}, "tp must be a whole number of at least 1"),
        ({"job": JOB | {"colour": 1}}, "'colour' is not known"),
        ({"job": JOB, "hours": 0}, "hours must be a number above 0"),
        ({"job": JOB, "hour": 1}, "'hour' is not known"),
        ({"job": JOB, "hours": float("inf")}, "hours must be a number above 0 and finite, got inf"),
        ({"job": JOB, "hours": 10**400}, "hours must be a number above 0 and finite, got 1000"),
        ({"job": JOB, "orders": float("inf")}, "orders must be a number of at least 1 and finite"),
        ({"job": JOB | {"tflops": float("inf")}}, "tflops must be a number above 0 and finite"),
        ({"job": JOB, "events": [{"at_h": 1, "slow": [1], "speed": float("inf")}]}, "is finite"),
        ({"job": JOB, "failures": [{"what": "deaths", "every_h": float("nan")}]}, "every_h must be a number above 0"),
        ({"job": JOB, "failures": [{"what": "deaths", "poisson_h": float("inf")}]}, "poisson_h must be a number"),
        ({"job": JOB, "events": [{"at_h": 1}]}, "events[0] needs exactly one of"),
        ({"job": JOB, "events": [{"at_h": 1, "dead": [16]}]}, "events[0] names worker 16"),
        ({"job": JOB, "events": [{"at_h": 1, "slow": [1], "speed": 2}]}, "events[0]: workers (1,) get speed 2"),
        ({"job": JOB, "events": [{"at_h": 1, "slow": [1]}]}, "events[0]: speed must be a number that"),
        ({"job": JOB, "events": [{"at_h": 1, "dead": [1], "slow": [1]}]}, "exactly one of"),
        ({"job": JOB, "events": [{"at_h": -1, "dead": [1]}]}, "at_h must be a number of at least 0"),
        ({"job": JOB, "failures": [{"what": "rain", "every_h": 1}]}, "failures[0].what is 'rain'"),
        ({"job": JOB, "failures": [{"what": "deaths"}]}, "exactly one of every_h"),
        ({"job": JOB, "failures": [{"what": "slow-downs", "every_h": 1, "speed": [0, 1]}]}, "above 0 and at most 1"),
        ({"job": JOB, "delays": {"detect_dead_s": -1}}, "delays: detect_dead_s"),
        ({"job": JOB, "documents": {"long_share": 2}}, "long_share is 2"),
        ({"job": JOB, "strategies": ["prayer"]}, "unknown strategy 'prayer'"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, content: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert simulate(path, "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("resihp: ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fail-stop/llama9/1h",), "unknown scenario"),
        (("missing.json",), "missing.json is not a file"),
        (("fail-stop/llama2-7b/1h", "--orders", 0), "--orders must be at least 1"),
        (("fail-stop/llama2-7b/1h", "--orders", -1), "--orders must be at least 1"),
        (("fail-stop/llama2-7b/1h", "--micro-batches", 10**12), "--micro-batches must be at least 1 and at most"),
        (("fail-stop/llama2-13b/1h", "--micro-batches", 1), "1 micro-batches are fewer than 2 replicas"),
    ],
)
def test_bad_arguments_get_one_line(arguments: tuple[Any, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
