# SPDX-License-Identifier: Apache-2.0
"""`resihp launch` with real processes, real signals and the real coordinator, but without Megatron."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import WAIT_S, Launched, eventually, is_alive

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes, keys
from megatron_resihp.control.commands.launch import seat
from megatron_resihp.control.head import returning
from megatron_resihp.control.transport import node_liveness
from megatron_resihp.control.transport.address import Address
from megatron_resihp.events.detection import Verdict
from megatron_resihp.events.training import Iteration
from megatron_resihp.plan import ParallelPlan, Replica, deal
from megatron_resihp.protocol.published import END, JobEnd

Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts launchers that don't outlive the test."""
    started: list[Launched] = []

    def start(*wishes: str, **options: Any) -> Launched:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        for wish in wishes:
            (run_dir / wish).touch()
        started.append(Launched(run_dir, **options))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def begun(run: Launched, workers: int = 3) -> list[int]:
    """Wait for epoch 0; the workers' processes."""
    run.await_event("epoch_started", epoch=0)
    return [run.worker_pid(worker) for worker in range(workers)]


def kill(pid: int) -> float:
    """SIGKILL; returns when the kernel had the process dead, which may take it a while on a busy machine."""
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    readable, _, _ = select.select([watched], [], [], WAIT_S)
    dead_at = time.time()
    os.close(watched)
    assert readable
    return dead_at


def test_a_run_that_reaches_its_end(launch: Launch) -> None:
    run = launch(arguments=("--iterations", "5"))
    pids = begun(run)
    again = launch()
    assert again.end() == 2 and f"launched by process {run.pid} on {socket.gethostname()}; give" in run.output()
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert len(run.events("run_started")) == 1, "the second launch has left the first one's log alone"
    assert "arguments ['--iterations', '5'] rank 2 of 3" in run.log(2)
    assert [event["reason"] for event in run.events("run_finished")] == ["finished"]
    assert (run.run_dir / "exit_code").read_text() == "0\n"
    assert "no worker dead" in run.output()
    assert not any(map(is_alive, pids))


def test_survivors_of_a_killed_worker_get_a_new_plan(launch: Launch) -> None:
    run = launch()
    pids = begun(run)
    dead_at = kill(pids[1])
    death = run.await_event("worker_dead", dead=1)
    noticed_after_s = death["noticed_at"] - dead_at
    print(f"\ndeath of a worker known to the coordinator after {1000 * noticed_after_s:.1f} ms")
    assert death["cause"] == "exit signal 9"
    assert noticed_after_s < 0.5
    run.await_event("recovery", to_epoch=1)
    eventually("worker 2 goes on", lambda: "epoch 1 members [0, 2]" in run.log(2))
    assert is_alive(pids[0]) and is_alive(pids[2])
    run.ask("finish")
    assert run.end() == 0, run.output()


def test_a_plan_that_is_asked_for_is_taken(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = launch()
    begun(run)
    replicas = [Replica(((worker,),), share) for worker, share in enumerate(deal((6, 4, 2)))]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": ParallelPlan(tuple(replicas)).to_dict()}))
    assert main(["apply", str(run.run_dir), str(file)]) == 0
    said = capsys.readouterr().out
    assert "replica 0: micro-batches 4 (0 3 6 9) → 6 (0 3 6 8 10 11)" in said and "change 1 begins" in said
    done = run.await_event("reconfiguration", to_epoch=1)
    assert "asked for by hand: plan.json" in done["why"] and 0 <= done["stood_still_s"] < WAIT_S
    assert main(["apply", str(run.run_dir), str(file)]) == 2
    assert capsys.readouterr().err == "resihp: this plan is in force already\n"
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert not run.events("epoch_broken")


@pytest.mark.parametrize("strategy", ["drop-replica", "no such"])
def test_survivors_are_planned_for_by_a_strategy(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """In a process of its own; where that has no plan, by uniform plans. A replay needs no planner."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job").write_text(json.dumps({"strategy": strategy, "plan_wait": WAIT_S}))
    run = launch()
    pids = begun(run)
    kill(pids[1])
    planned = run.await_event("planned")
    if strategy == "no such":
        assert (planned["strategy"], planned["instead_of"]) == ("uniform", strategy)
        assert "no strategy no such" in planned["reason"]
    else:
        assert planned["strategy"] == strategy and planned["iteration_s"] > 0
    run.await_event("recovery", to_epoch=1)
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert main(["replay", str(run.run_dir)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("act", [*(pytest.param(act, marks=pytest.mark.nightly) for act in ("observe", "ask")), "act"])
def test_a_slow_worker_gets_less_to_do_if_that_is_wanted(launch: Launch, tmp_path: Path, act: str) -> None:
    """From a verdict of the detector to another plan."""
    slow = Verdict(kind="compute", change="onset", workers=(2,), speed=0.25, since=1, iteration=1)
    (tmp_path / "run").mkdir()
    job = {"strategy": "greyhound", "act": act, "train_iters": 1000}
    (tmp_path / "run" / "job").write_text(json.dumps(job))
    run = launch(judged=[slow, Iteration(iteration=2, duration_s=60.0)])
    begun(run)
    if act == "ask":
        proposal = run.await_event("proposal")
        assert not run.events("plan_change")
        assert main(["apply", str(run.run_dir), proposal["path"]]) == 0
    if act == "observe":
        found = run.await_event("would_change")
        assert found["gain"] > 0.3 and found["lost_s"] > found["cost_s"] and "worker 2 at 0.25" in found["why"]
    else:
        run.await_event("reconfiguration", to_epoch=1)
        plan = ParallelPlan.from_dict(run.await_event("epoch_started", epoch=1)["plan"])
        shares = {worker: len(plan.replicas[plan.replica_of(worker) or 0].micro_batches) for worker in plan.working}
        assert shares[2] < 3 and min(shares[0], shares[1]) > 4
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert len(run.events("plan_change")) == (act != "observe")


def test_a_worker_that_died_is_started_anew_and_taken_in(launch: Launch) -> None:
    """Three complete replicas of one worker each again; so often and no more."""
    run = launch(max_restarts=1)
    pids = begun(run)
    kill(pids[1])
    run.await_event("worker_restarted", restarted=4, instead_of=1)
    run.await_event("epoch_started", epoch=2)
    assert "rank 1 of 3" in run.log(4)
    kill(run.worker_pid(4))
    run.await_event("epoch_started", epoch=3)
    run.ask("finish")
    assert run.end() == 0, run.output()
    plans = [ParallelPlan.from_dict(event["plan"]) for event in run.events("epoch_started")]
    assert [plan.working for plan in plans] == [(0, 1, 2), (0, 2), (0, 4, 2), (0, 2)]
    assert len(run.events("worker_restarted")) == 1


def test_a_worker_that_runs_on_unheard_is_ended_and_started_anew(launch: Launch) -> None:
    """As one does whose connections a network has dropped."""
    run = launch("mute_2", max_restarts=1, survivor_timeout_s=1.0)
    pids = begun(run)
    kill(pids[1])
    assert run.await_event("worker_dead", dead=2)["cause"] == "did not report within 1 s"
    run.await_event("worker_restarted", restarted=5, instead_of=2)
    assert not is_alive(pids[2])
    run.ask("finish")
    assert run.end() == 0, run.output()


@pytest.mark.nightly
def test_a_worker_that_was_stopped_for_good_is_started_anew(launch: Launch) -> None:
    run = launch(max_restarts=1, heartbeat_timeout_s=1.0)
    os.kill(begun(run)[1], signal.SIGSTOP)
    run.await_event("epoch_started", epoch=2)
    run.ask("finish")
    assert run.end() == 0, run.output()
    plan = ParallelPlan.from_dict(run.events("epoch_started")[-1]["plan"])
    assert plan.working == (0, 4, 2), "the first plan, with another worker in the stopped one's place"


def test_a_joining_worker_that_is_cut_off_takes_no_connection_of_the_others_with_it(launch: Launch) -> None:
    run = launch(max_restarts=1, heartbeat_timeout_s=1.0)
    kill(begun(run)[1])
    run.await_event("epoch_started", epoch=2)
    os.kill(run.worker_pid(4), signal.SIGSTOP)
    run.await_event("recovery", to_epoch=3)
    run.ask("finish")
    assert run.end() == 0, run.output()


@pytest.mark.nightly
def test_others_go_on_without_a_joining_worker_that_dies_while_it_is_taken_in(launch: Launch) -> None:
    run = launch("dawdle_5", max_restarts=1)
    kill(begun(run)[2])
    run.await_event("worker_waiting", waiting=5)
    kill(run.process_of(5))
    run.await_event("worker_dead", dead=5)
    run.await_event("recovery", dead=[2, 5])
    run.ask("finish")
    assert run.end() == 0, run.output()


@pytest.mark.nightly
def test_a_joining_worker_does_not_delay_the_end(launch: Launch) -> None:
    """It is starting, and hears nothing yet; members have ten seconds to end by themselves."""
    run = launch("idle_4", max_restarts=1)
    kill(begun(run)[1])
    run.await_event("worker_restarted", restarted=4)
    run.process_of(4)
    asked_at = time.monotonic()
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert time.monotonic() - asked_at < 8.0


def test_children_of_a_killed_worker_die_with_it(launch: Launch) -> None:
    run = launch("breed_1")
    pids = begun(run)
    forked, executed = run.children_of(1)
    memory = Path(f"/dev/shm/torch_{forked}_1_0")
    memory.touch()
    os.kill(pids[1], signal.SIGKILL)
    eventually("the children die", lambda: not is_alive(forked) and not is_alive(executed), 5.0)
    eventually("their shared memory is freed", lambda: not memory.exists())
    run.await_event("recovery", to_epoch=1)


def test_a_stopped_worker_is_given_up_cut_off_and_ends_itself(launch: Launch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "knock_1").write_text(str(server.getsockname()[1]))
        run = launch(heartbeat_timeout_s=1.0)
        pids = begun(run)
        server.settimeout(5.0)
        peer, _ = server.accept()
    os.kill(pids[1], signal.SIGSTOP)
    death = run.await_event("worker_dead", dead=1)
    assert death["cause"].startswith("no heartbeat for 1.")
    run.await_event("recovery", to_epoch=1)
    with peer:
        peer.settimeout(2.0)
        assert peer.recv(1) == b"", "peers of a stopped worker must not wait for it"
    assert is_alive(pids[1])
    os.kill(pids[1], signal.SIGCONT)
    eventually("the stopped worker ends", lambda: not is_alive(pids[1]), 5.0)
    assert len(run.events("worker_dead")) == 1
    run.ask("finish")
    assert run.end() == 0, run.output()


def test_a_worker_that_stays_stopped_does_not_delay_the_end(launch: Launch) -> None:
    run = launch(heartbeat_timeout_s=0.5, grace_s=3 * WAIT_S)
    pids = begun(run)
    os.kill(pids[1], signal.SIGSTOP)
    run.await_event("recovery", to_epoch=1)
    run.ask("finish")
    assert run.end() == 0, run.output()
    assert not is_alive(pids[1])


def test_an_error_ends_the_job_and_is_shown(launch: Launch) -> None:
    run = launch("breed_0")
    begun(run)
    children = run.children_of(0)
    run.ask("fail_2")
    assert run.end() == 1
    [failure] = run.events("worker_failed")
    assert (failure["failed"], failure["error"]) == (2, "ValueError: the loss is no number")
    assert not run.events("worker_dead"), "an error is no death"
    output = run.output()
    assert "resihp: worker 2 ended with exit code 1; its last lines:\n" in output
    assert "    raise ValueError(" in output
    assert "worker 0 ended" not in output and "worker 1 ended" not in output
    assert "resihp: ended with exit code 1: worker 2 failed: ValueError: the loss is no number\n" in output
    assert not any(map(is_alive, children))


def test_an_exit_code_without_a_word_ends_the_job(launch: Launch) -> None:
    run = launch()
    begun(run)
    run.ask("crash_0")
    assert run.end() == 1
    assert "worker 0 failed: exit code 3" in run.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_ends_the_job_in_order(launch: Launch, number: signal.Signals, code: int) -> None:
    """Some job managers send it to the workers, too."""
    run = launch()
    pids = begun(run)
    for pid in pids if number == signal.SIGUSR1 else []:
        os.kill(pid, number)
    os.kill(run.pid, number)
    assert run.end() == code
    assert f"resihp: node 0 got {number.name}; the job ends after an iteration" in run.output()
    assert f"stopped by signal {number}" in run.output()
    assert not any(map(is_alive, pids))


@pytest.mark.nightly
def test_an_interrupt_that_ends_the_reader_of_the_output_first_ends_the_job_in_order(launch: Launch) -> None:
    """As Ctrl-C does where the output goes to tee."""
    reader, output = socket.socketpair()
    run = launch(output=output.fileno())
    begun(run)
    reader.shutdown(socket.SHUT_RDWR)
    os.kill(run.pid, signal.SIGINT)
    assert run.end() == 130
    assert run.events("run_finished")[-1]["exit_code"] == 130
    reader.close()
    output.close()


def test_a_second_signal_kills_at_once(launch: Launch) -> None:
    run = launch("deaf_0", "deaf_1", "hang_2", "deaf_2", "breed_0", grace_s=3 * WAIT_S)
    pids = begun(run)
    pids += run.children_of(0)
    os.kill(run.pid, signal.SIGINT)
    time.sleep(0.1)  # Not to wait for anything: two signals at the same moment are one.
    assert all(map(is_alive, pids)), "the first one leaves the end to the workers"
    os.kill(run.pid, signal.SIGINT)
    assert run.end() == 130
    assert not any(map(is_alive, pids))
    assert run.events("run_finished")[-1]["exit_code"] == 130
    assert "killed by a second SIGINT" in run.output()


def test_workers_that_outlive_the_end_are_killed(launch: Launch) -> None:
    run = launch("hang_1")
    pids = begun(run)
    run.store().set(keys.END, END.write(JobEnd(7, "for the test", 0.1), "a test"))
    assert run.end() == 7
    assert not any(map(is_alive, pids))


def test_a_killed_agent_takes_its_workers_with_it(launch: Launch) -> None:
    run = launch("breed_1")
    pids = begun(run)
    pids += run.children_of(1)
    os.kill(run.pid, signal.SIGKILL)
    run.end()
    eventually("workers die, and all that they have started", lambda: not any(map(is_alive, pids)), 5.0)


def test_a_termination_after_a_warning_leaves_the_end_to_the_workers(launch: Launch) -> None:
    """A script may pass SIGUSR1 on that has come by itself, and SIGTERM follows when the job's time is over."""
    run = launch("deaf_0", "deaf_1", "deaf_2")
    pids = begun(run)
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
        os.kill(run.pid, number)
        time.sleep(0.05)  # Not to wait for anything: two signals at the same moment are one.
    eventually("workers hear of the checkpoint that is wanted", lambda: "save 1" in run.log(0))
    assert all(map(is_alive, pids))
    run.ask("finish")
    assert run.end() == 138, run.output()


@pytest.mark.parametrize("mode", ["prefix", "both"])
def test_marked_lines_on_standard_output(launch: Launch, mode: str) -> None:
    run = launch("fail_1", logs=mode, workers_per_node=2)
    assert run.end() == 1
    output = run.output()
    assert "[w0] arguments [] rank 0 of 2\n" in output
    assert "[w1] ValueError: the loss is no number\n[w1] and more\n" in output
    assert "its last lines:" in output and "\n  ValueError: the loss is no number\n  and more\n" in output
    assert ("rank 1 of 2" in run.log(1)) == (mode == "both")


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "error", "code"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args(['--lerning-rate', '3'])", "exit code 2", 2),
        ("import sys; sys.exit('no data')", "no data", 1),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'", 1),
        ("1 +", "SyntaxError: invalid syntax", 1),
        ("import os; os.kill(os.getpid(), 9)", "worker 0 (exit signal 9) died during start-up", exit_codes.RETRY),
    ],
)
def test_scripts_that_fail(launch: Launch, tmp_path: Path, text: str, error: str, code: int) -> None:
    run = launch(script=script(tmp_path, text), workers_per_node=1)
    assert run.end() == code
    assert error in run.events("run_finished")[-1]["reason"]
    assert "worker 0 ended with" in run.output()


MEETING = """
import datetime, os, signal, torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
ones = torch.ones(1)
dist.all_reduce(ones)
print("there are", int(ones))
if "--die" in os.sys.argv and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones)
"""


def test_a_script_without_the_plugin_runs_as_under_torchrun(launch: Launch, tmp_path: Path) -> None:
    """Its processes find each other by themselves."""
    run = launch(script=script(tmp_path, MEETING), workers_per_node=2)
    assert run.end() == 0, run.output()
    assert run.log(1) == "there are 2\n"


def test_nothing_is_recovered_without_the_plugin(launch: Launch, tmp_path: Path) -> None:
    run = launch(script=script(tmp_path, MEETING), workers_per_node=2, arguments=("--die",))
    assert run.end() != 0, run.output()


def test_a_script_runs_as_python_would_run_it(launch: Launch, tmp_path: Path) -> None:
    text = """
import atexit, os, sys, threading, time
from neighbour import NAME
atexit.register(print, "hook")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print(__name__, NAME, os.path.basename(__file__), sys.argv[1:], sys.modules["__main__"].NAME)
"""
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    run = launch(script=script(tmp_path, text), workers_per_node=1, arguments=("--run-dir", "x"))
    assert run.end() == 0
    assert run.log(0) == "__main__ neighbour script.py ['--run-dir', 'x'] neighbour\nthread\nhook\n"


def test_the_command_with_a_fresh_interpreter(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import megatron_resihp\nmegatron_resihp.enable = lambda: None\n")
    text = "import os, sys; print(sys.argv[1:], os.getpgrp() == os.getpid(), sys.path[0]); import nothing_of_that_name"
    path = script(tmp_path, text)
    command = [sys.executable, "-m", "megatron_resihp.cli", "launch", "--nproc-per-node", "1", str(path), "--nnodes=3"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    [run_dir] = (tmp_path / "resihp-runs").iterdir()
    log = (run_dir / "logs" / "worker_0.log").read_text()
    assert log.startswith(f"['--nnodes=3'] True {tmp_path}\n")
    assert "resihp: ended with exit code 1: worker 0 failed: ModuleNotFoundError" in done.stderr
    assert "FAILED (exit 1)" in done.stdout


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def two_nodes(launch: Launch, port: int, **options: Any) -> tuple[Launched, Launched]:
    options = {"nodes": 2, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port), **options}
    first, second = launch(node=0, **options), launch(node=1, **options)
    eventually("node 1 joins", lambda: "node 1 has joined" in second.output())
    return first, second


def test_a_lost_node_is_noticed_and_survived(launch: Launch, port: int) -> None:
    first, second = two_nodes(launch, port)
    pids = begun(first, 4)
    dead_at = kill(second.pid)
    death = first.await_event("worker_dead", dead=3)
    noticed_after_s = death["noticed_at"] - dead_at
    print(f"\nloss of a node known to the coordinator after {1000 * noticed_after_s:.1f} ms")
    assert death["cause"] == "node lost: connection lost"
    assert noticed_after_s < 0.5
    eventually("its workers die with it", lambda: not any(map(is_alive, pids[2:])), 5.0)
    eventually("node 0 goes on", lambda: "epoch 1 members [0, 1]" in first.log(0))
    first.ask("finish")
    assert first.end() == 0, first.output()


def test_a_lost_node_comes_back(launch: Launch, port: int) -> None:
    """It is started with the same command; its workers have new ids."""
    first, second = two_nodes(launch, port)
    begun(first, 4)
    options = {"nodes": 2, "node": 1, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    twin = launch(connect_timeout_s=0.5, **options)
    assert twin.end() == 2
    assert "node 1 has joined already" in twin.output()
    again = launch(**options)
    eventually("it waits", lambda: "node 1 waits until the loss of the one before it is noticed" in again.output())
    os.kill(second.pid, signal.SIGKILL)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    os.kill(again.pid, signal.SIGKILL)
    first.await_event("recovery", dead=[2, 3, 6, 7])
    once_more = launch(**options)
    eventually("it is taken in", lambda: "members [0, 1, 10, 11]" in first.log(0))
    first.ask("finish")
    assert (first.end(), once_more.end()) == (0, 0), once_more.output()
    assert "node 1 has joined the job" in once_more.output()


def test_a_late_node_joins_is_lost_and_comes_back(launch: Launch, port: int) -> None:
    """It may be launched before node 0 even, and waits; nobody waits for it."""
    options = {"late_nodes": 1, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    late = launch(node=1, **options)
    first = launch(node=0, connect_timeout_s=1.0, **options)
    eventually("it is taken in", lambda: "members [0, 1, 2, 3]" in first.log(0))
    assert "rank 1 of 2" in first.log(3)
    twin = launch(node=1, connect_timeout_s=0.5, **options)
    assert twin.end() == 2
    assert "node 1 has joined already" in twin.output()
    os.kill(late.pid, signal.SIGKILL)
    first.await_event("recovery", dead=[2, 3])
    again = launch(node=1, **options)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    first.ask("finish")
    assert (first.end(), again.end()) == (0, 0), again.output()
    assert [death["dead"] for death in first.events("worker_dead")] == [2, 3]


def test_a_late_node_waits_while_the_job_starts(launch: Launch, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "STILL_THERE_S", 0.5)
    options = {"late_nodes": 1, "workers_per_node": 1, "coordinator": Address("127.0.0.1", port)}
    first = launch("idle_0", node=0, connect_timeout_s=0.5, **options)
    late = launch(node=1, **options)
    eventually("it says so", lambda: "node 1 waits until the job trains" in late.output())
    assert not late.log(1) and not first.events("worker_dead")
    os.kill(first.pid, signal.SIGKILL)
    assert late.end() == 2
    assert "nothing answers at" in late.output()


def test_a_late_node_that_could_not_join_may_try_again(
    launch: Launch, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("a firewall")

    options = {"late_nodes": 1, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    first = launch(node=0, **options)
    begun(first, 2)
    with monkeypatch.context() as patched:
        patched.setattr(node_liveness, "_connect", unreachable)
        late = launch("idle_2", "idle_3", node=1, **options)
        assert late.end() == 2
    assert "no liveness connection to the coordinator" in late.output() and "a firewall" in late.output()
    again = launch(node=1, **options)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    first.ask("finish")
    assert (first.end(), again.end()) == (0, 0), again.output()


@pytest.mark.nightly
def test_a_node_whose_launcher_was_killed_before_it_was_connected_may_come(
    launch: Launch, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has never heard of it. `take` is what such a launcher has done."""
    monkeypatch.setattr(returning, "CONNECTS_WITHIN_S", 1.0)
    options = {"late_nodes": 1, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    first = launch(node=0, **options)
    begun(first, 2)
    assert eventually("it may join", lambda: returning.take(first.run_dir, 1)) == (2, 3)
    again = launch(node=1, **options)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    first.ask("finish")
    assert (first.end(), again.end()) == (0, 0), again.output()
    assert not first.events("worker_dead")


def test_a_silent_node_is_given_up_and_ends_itself(launch: Launch, port: int) -> None:
    first, second = two_nodes(launch, port, heartbeat_timeout_s=1.0)
    pids = begun(first, 4)
    # Its workers run on, as those of a machine whose network is gone would.
    os.kill(second.pid, signal.SIGSTOP)
    death = first.await_event("worker_dead", dead=2)
    assert death["cause"].startswith("node lost: no heartbeat for 1.")
    eventually("node 0 goes on", lambda: "epoch 1 members [0, 1]" in first.log(0))
    os.kill(second.pid, signal.SIGCONT)
    assert second.end() == exit_codes.RETRY
    assert not any(map(is_alive, pids[2:]))
    first.ask("finish")
    assert first.end() == 0


def test_the_other_nodes_end_with_the_coordinators(launch: Launch, port: int) -> None:
    first, second = two_nodes(launch, port)
    pids = begun(first, 4)
    os.kill(first.pid, signal.SIGKILL)
    assert second.end() == exit_codes.RETRY
    assert "resihp: ended with exit code 75: the coordinator is lost" in second.output()
    assert not any(map(is_alive, pids))


def test_a_node_that_is_told_to_end_leaves_the_job(launch: Launch, port: int) -> None:
    """Nobody dies; and it may come back."""
    first, second = two_nodes(launch, port)
    pids = begun(first, 4)
    os.kill(second.pid, signal.SIGTERM)
    assert second.end() == 0, second.output()
    assert "resihp: node 1 got SIGTERM; this node asks to leave" in second.output()
    assert "resihp: this node has left the job, which goes on" in second.output()
    assert not any(map(is_alive, pids[2:]))
    assert first.await_event("reconfiguration", to_epoch=1)["why"] == "node 1 leaves"
    assert first.await_event("node_left", node=1)["left"] == [2, 3]
    options = {"nodes": 2, "workers_per_node": 2, "coordinator": Address("127.0.0.1", port)}
    eventually("its place is free", (first.run_dir / "returning" / "node_1.json").exists)
    again = launch(node=1, **options)
    eventually("it is taken in", lambda: "members [0, 1, 6, 7]" in first.log(0))
    for run in (again, first):
        os.kill(run.pid, signal.SIGTERM)
    assert (first.end(), again.end()) == (143, 143), "told at once, all end"
    assert not first.events("worker_dead") and not first.events("epoch_broken")


def test_an_interrupt_of_any_node_ends_the_job(launch: Launch, port: int) -> None:
    first, second = two_nodes(launch, port)
    begun(first, 4)
    os.kill(second.pid, signal.SIGINT)
    assert (first.end(), second.end()) == (130, 130)


def test_nodes_that_disagree_about_the_job(launch: Launch, port: int) -> None:
    options = {"nodes": 2, "coordinator": Address("127.0.0.1", port)}
    launch(node=0, workers_per_node=2, **options)
    second = launch(node=1, workers_per_node=3, **options)
    assert second.end() == 2
    assert "the coordinator was started with --nnodes 2 --nproc-per-node 2; give node 1 the same" in second.output()
    late = launch(node=2, workers_per_node=2, late_nodes=1, **options)
    assert late.end() == 2
    assert "--nnodes 2 --nproc-per-node 2; give node 2 the same" in late.output()


def test_a_node_that_does_not_come(launch: Launch, port: int) -> None:
    run = launch(nodes=2, coordinator=Address("127.0.0.1", port), connect_timeout_s=1.0)
    assert run.end() == exit_codes.RETRY
    assert "node lost: did not connect" in run.output()
