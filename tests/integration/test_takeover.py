# SPDX-License-Identifier: Apache-2.0
"""`resihp coordinator --standby`: another coordinator goes on in the place of a lost one, and training with it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcds import needs_etcd
from jobs import Job, Jobs, check_training, tiny
from launched import WAIT_S, Launched, eventually

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.commands.contact import Contact, read_contact
from megatron_resihp.control.commands.launch import launcher
from megatron_resihp.control.coordination.actions import Action, End
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.head.decision_logs import decisions_at
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.etcd.gateway import Gateway
from megatron_resihp.control.transport.etcd.location import Location
from megatron_resihp.control.transport.etcd.presence import SETTLE_S, lease_holders
from megatron_resihp.control.transport.store import client as store_client
from megatron_resihp.control.transport.store import lasting
from megatron_resihp.control.transport.store import relay as store_relay
from megatron_resihp.report.run.standing import Launcher, launcher_of

pytestmark = [pytest.mark.nightly, needs_etcd]
HOST = "127.0.0.1"


@pytest.fixture
def place(place: Location) -> Location:
    """With a short lease."""
    return replace(place, lease_s=3)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a coordinator may not answer."""
    monkeypatch.setattr(store_client, "LED_ANSWER_S", 3.0)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """A coordinator, and two nodes of two tiny workers each, which train."""

    def __init__(self, run_dir: Path, place: Location) -> None:
        run_dir.mkdir()
        self.run_dir, self._place = run_dir, place
        self.all: list[Launched] = []

    def begin(self, *wishes: str, trains: bool = True, min_workers: int = 1, **of_nodes: Any) -> None:
        """`wishes`: of the workers from the start. `trains`: wait until they do."""
        for wish in wishes:
            (self.run_dir / wish).touch()
        self.first = self.coordinator(standby=False, min_workers=min_workers)
        eventually("it has said so", lambda: "which join with" in self.first.output())
        self.nodes: list[Launched] = []
        for node in range(2):
            self.launch(node, **of_nodes)
        if trains:
            self.first.await_event("epoch_started", epoch=0)

    def launch(self, node: int, **options: Any) -> None:
        """A node is to be part of the job."""
        at = {"coordinator": self.first.options.coordinator, **options}
        self.nodes.append(self._started(node=node, **at))

    def coordinator(self, standby: bool = True, port: int | None = None, **options: Any) -> Launched:
        at = Address(HOST, port or free_port())
        return self._started(alone=True, standby=standby, control=self._place, coordinator=at, **options)

    def await_decision(self, what: str, times: int = 1) -> None:
        """Of so many times that the log has this."""
        log = self.run_dir / "decisions.jsonl"
        eventually(what, lambda: log.exists() and log.read_text().count(what) >= times)

    def _started(self, **options: Any) -> Launched:
        self.all.append(Launched(self.run_dir, **{"nodes": 2, "workers_per_node": 2, **options}))
        return self.all[-1]

    def lose(self) -> None:
        """The first coordinator is killed."""
        self.first.kill()

    def finish(self, *coordinators: Launched) -> None:
        """All that is left comes to a good end, and what was decided is whole."""
        self.first.ask("finish")
        self.end(0, *coordinators)

    def end(self, code: int, *coordinators: Launched, within_s: float = WAIT_S) -> None:
        """All that is left ends with this, and what was decided is whole."""
        for each in (*coordinators, *self.nodes):
            assert each.end(within_s) == code, each.output()
        assert decisions_at(str(self._place)) == decisions_at(str(self.run_dir))
        assert main(["replay", str(self._place)]) == 0
        assert (self.run_dir / "exit_code").read_text() == f"{code}\n"
        left = {path.name for path in self.run_dir.iterdir()}
        assert not left & {"coordinator.json", "secret"}, left


@pytest.fixture
def begin(tmp_path: Path, place: Location, short: None) -> Iterator[Callable[..., Cluster]]:
    cluster = Cluster(tmp_path / "run", place)

    def start(*wishes: str, **options: Any) -> Cluster:
        cluster.begin(*wishes, **options)
        return cluster

    yield start
    for each in cluster.all:
        each.kill()


def test_one_that_waits_takes_over_and_training_goes_on(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    standby = cluster.coordinator()
    eventually("it waits", lambda: "resihp: waits until the coordinator of etcd://" in standby.output())
    cluster.lose()
    standby.await_event("coordinator_replaced", epoch=0)
    for node in cluster.nodes:
        eventually("it is found", lambda node=node: "has found another coordinator" in node.output())
    assert not standby.events("epoch_broken"), "training goes on without a recovery"
    os.kill(standby.worker_pid(3), signal.SIGKILL)
    standby.await_event("recovery", to_epoch=1)
    cluster.finish(standby)
    assert [event["dead"] for event in standby.events("worker_dead")] == [3]


def test_one_may_come_later_and_at_the_same_port(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    cluster.lose()
    assert launcher_of(cluster.run_dir) is Launcher.AWAITED
    assert cluster.first.options.coordinator is not None
    later = cluster.coordinator(port=cluster.first.options.coordinator.port)
    later.await_event("coordinator_replaced")
    cluster.finish(later)


def test_an_epoch_that_is_being_built_is_built_again(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    cluster.first.ask("dawdle_0")
    os.kill(cluster.first.worker_pid(3), signal.SIGKILL)
    cluster.await_decision("EpochPlan")
    cluster.first.await_event("epoch_broken", broken_epoch=0)
    standby = cluster.coordinator()
    cluster.lose()
    standby.await_event("coordinator_replaced")
    (standby.run_dir / "dawdle_0").unlink()
    recovery = standby.await_event("recovery")
    assert recovery["to_epoch"] in (1, 2)
    cluster.finish(standby)


def test_a_job_that_has_not_begun_to_train_ends(begin: Callable[..., Cluster]) -> None:
    """At once: agents and workers don't wait in vain for groups that were to meet in the lost store."""
    cluster = begin("dawdle_0", trains=False)
    cluster.await_decision('"kind": "Ready"', times=3)
    standby = cluster.coordinator()
    cluster.lose()
    finished = standby.await_event("run_finished")
    assert finished["reason"] == "the coordinator was lost before the first iteration"
    (cluster.run_dir / "dawdle_0").unlink()
    cluster.end(exit_codes.RETRY, standby)


def test_survivors_that_save_what_they_hold_tell_the_next_one(begin: Callable[..., Cluster]) -> None:
    cluster = begin("slow_save_0", min_workers=4)
    os.kill(cluster.first.worker_pid(3), signal.SIGKILL)
    cluster.await_decision("EmergencyCheckpointOrder")
    standby = cluster.coordinator()
    cluster.lose()
    standby.await_event("coordinator_replaced")
    (cluster.run_dir / "slow_save_0").unlink()
    cluster.end(exit_codes.NO_PLAN, standby)


def test_an_end_that_nobody_was_told_of_is_told(
    begin: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coordinator is lost when it has decided that the job ends."""
    carry_out = Coordinator._carry_out

    def lost_at_the_end(self: Coordinator, action: Action) -> int | None:
        if isinstance(action, End) and (tmp_path / f"lose_{os.getpid()}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return carry_out(self, action)

    monkeypatch.setattr(Coordinator, "_carry_out", lost_at_the_end)
    cluster = begin()
    standby = cluster.coordinator()
    eventually("it waits", lambda: "resihp: waits until" in standby.output())
    (tmp_path / f"lose_{cluster.first.pid}").touch()
    cluster.first.ask("finish")
    # A lease lapses, and then those of the nodes; without the standby they would wait for 120 s.
    cluster.end(0, standby, within_s=60.0)
    assert cluster.first.end() == -signal.SIGKILL
    assert [event["exit_code"] for event in standby.events("run_finished")] == [0]


def test_a_death_that_nobody_was_told_of_is_told_to_the_next_one(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    killed = cluster.first.worker_pid(1)
    cluster.lose()
    os.kill(killed, signal.SIGKILL)
    standby = cluster.coordinator()
    standby.await_event("recovery", to_epoch=1)
    cluster.finish(standby)
    assert [event["dead"] for event in standby.events("worker_dead")] == [1]


def test_a_node_comes_back_that_the_lost_one_could_not_offer_a_place_any_more(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    cluster.nodes.pop(1).kill()
    cluster.first.await_event("recovery", to_epoch=1)
    place = cluster.run_dir / "returning" / "node_1.json"
    eventually("it has written it", place.exists)
    cluster.lose()
    place.unlink()
    standby = cluster.coordinator()
    standby.await_event("coordinator_replaced")
    cluster.launch(node=1)
    standby.await_event("epoch_started", epoch=2)
    cluster.finish(standby)
    assert {event["waiting"] for event in standby.events("worker_waiting")} == {10, 11}


@pytest.mark.parametrize("leases", [True, False])
def test_a_node_that_is_lost_too_is_given_up(
    begin: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, leases: bool
) -> None:
    if not leases:
        monkeypatch.setattr(launcher, "LEADERLESS_S", 5.0)
        monkeypatch.setattr(launcher.Presence, "begin", lambda *_: None)
    cluster = begin()
    cluster.lose()
    cluster.nodes.pop(1).kill()
    standby = cluster.coordinator()
    deaths = [standby.await_event("worker_dead", dead=worker) for worker in (2, 3)]
    why = "lost together with the coordinator" if leases else "did not connect to the coordinator that has taken over"
    assert {death["cause"] for death in deaths} == {f"node lost: {why}"}
    standby.await_event("recovery", to_epoch=1)
    cluster.finish(standby)


def test_nodes_that_all_lost_etcd_are_not_given_up(begin: Callable[..., Cluster], place: Location) -> None:
    """What stops them here may be a network that cuts them off; their leases don't tell it from their end."""
    cluster = begin()
    standby = cluster.coordinator()
    eventually("it waits", lambda: "resihp: waits until" in standby.output())
    cluster.lose()
    for node in cluster.nodes:
        os.kill(node.pid, signal.SIGSTOP)
    replaced_at = standby.await_event("coordinator_replaced")["time"]
    with closing(Gateway(place)) as gateway:
        run = read_contact(cluster.run_dir).token
        eventually("their leases lapse", lambda: not lease_holders(gateway, run)[1])
    eventually("others would be given up by now", lambda: time.time() > replaced_at + 3 * SETTLE_S)
    for node in cluster.nodes:
        os.kill(node.pid, signal.SIGCONT)
    for node in cluster.nodes:
        eventually("it is found", lambda node=node: "has found another coordinator" in node.output())
    cluster.finish(standby)
    assert not standby.events("worker_dead")


def test_workers_that_come_back_find_it(begin: Callable[..., Cluster]) -> None:
    cluster = begin(max_restarts=1)
    standby = cluster.coordinator()
    cluster.lose()
    standby.await_event("coordinator_replaced")
    os.kill(standby.worker_pid(3), signal.SIGKILL)
    standby.await_event("worker_waiting", waiting=7)
    standby.await_event("epoch_started", epoch=2)
    cluster.finish(standby)


def test_two_are_lost_one_after_the_other(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    second, third = cluster.coordinator(), cluster.coordinator()
    cluster.lose()
    replaced = second.await_event("coordinator_replaced")
    led, waits = (second, third) if f"process {second.pid} " in replaced["by"] else (third, second)
    led.kill()
    eventually("it is replaced, too", lambda: len(waits.events("coordinator_replaced")) == 2)
    os.kill(waits.worker_pid(2), signal.SIGKILL)
    waits.await_event("recovery", to_epoch=1)
    cluster.finish(waits)


def test_one_that_was_stopped_does_no_harm(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    standby = cluster.coordinator()
    log = cluster.run_dir / "events.jsonl"
    of_the_first = log.stat().st_ino
    os.kill(cluster.first.pid, signal.SIGSTOP)
    standby.await_event("coordinator_replaced")
    eventually("events are the next one's alone", lambda: log.stat().st_ino != of_the_first)
    os.kill(standby.worker_pid(3), signal.SIGKILL)
    standby.await_event("recovery", to_epoch=1)
    os.kill(cluster.first.pid, signal.SIGCONT)
    assert cluster.first.end() == exit_codes.RETRY
    assert not standby.events("run_finished") and not (standby.run_dir / "exit_code").exists()
    os.kill(standby.worker_pid(2), signal.SIGKILL)
    standby.await_event("recovery", to_epoch=2)
    cluster.finish(standby)


@pytest.mark.parametrize("also", ["nothing else", "the run directory"])
def test_one_that_loses_etcd_makes_way(
    begin: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, also: str
) -> None:
    """Its nodes reach it all the time. They find the next one by themselves where it can't know of that."""
    ask, blind = Gateway._ask_member, also == "the run directory"
    if blind:
        monkeypatch.setattr(store_relay, "ELSEWHERE_S", 1.0)
        monkeypatch.setattr(Contact, "is_followed", lambda self, run_dir: False)

    def ask_if_in_reach(self: Gateway, *of_request: Any) -> tuple[int, bytes]:
        if (tmp_path / f"cut_off_{os.getpid()}").exists():
            raise OSError("out of reach")
        return ask(self, *of_request)

    monkeypatch.setattr(Gateway, "_ask_member", ask_if_in_reach)
    cluster = begin()
    standby = cluster.coordinator()
    eventually("it waits", lambda: "resihp: waits until" in standby.output())
    (tmp_path / f"cut_off_{cluster.first.pid}").touch()
    standby.await_event("coordinator_replaced")
    for node in cluster.nodes:
        eventually("it is found", lambda node=node: "has found another coordinator" in node.output())
    if not blind:
        assert cluster.first.end() == exit_codes.RETRY
        assert "the coordinator is lost: another has taken over etcd://" in cluster.first.output()
    os.kill(standby.worker_pid(3), signal.SIGKILL)
    standby.await_event("recovery", to_epoch=1)
    cluster.finish(standby)
    assert [event["dead"] for event in standby.events("worker_dead")] == [3]


def test_where_none_comes_the_job_ends_as_without(
    begin: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "LEADERLESS_S", 3.0)
    cluster = begin()
    cluster.lose()
    for node in cluster.nodes:
        assert node.end() == exit_codes.RETRY, node.output()
        assert "and no other coordinator has come within 3 s" in node.output()


def test_a_standby_ends_with_the_job(begin: Callable[..., Cluster]) -> None:
    cluster = begin()
    standby = cluster.coordinator()
    eventually("it waits", lambda: "resihp: waits until" in standby.output())
    cluster.finish(cluster.first)
    assert standby.end() == 0
    assert "the job has ended with exit code 0: finished" in standby.output()


def begun(jobs: Jobs, tmp_path: Path, place: Location, arguments: list[str]) -> tuple[Job, Job, Job, Job]:
    """A job of two nodes: its coordinator, the nodes, and another coordinator that waits."""
    options: dict[str, Any] = {"workers": 2, "nodes": 2, "coordinator": [HOST, free_port()]}
    leads = {"alone": True, "control": str(place)}
    first = jobs.start(arguments, **leads, **options)
    jobs.nursery.serve_until(lambda: "which join with" in first.output(), first.started_at + 30.0)
    others = []
    for name, more in (("node0", {"node": 0}), ("node1", {"node": 1}), ("standby", {**leads, "standby": True})):
        (tmp_path / name).symlink_to(first.run_dir)  # by this name the nursery tells it from others
        if name == "standby":
            options["coordinator"] = [HOST, free_port()]
        others.append(jobs.nursery.start(tmp_path / name, arguments, **more, **options))
    node0, node1, standby = others
    return first, node0, node1, standby


@pytest.mark.parametrize(("also", "dead"), [("nothing else", set()), ("node 0", {0, 1}), ("a worker before", {3})])
def test_it_trains_what_it_would_have_trained(
    jobs: Jobs,
    tmp_path: Path,
    place: Location,
    also: str,
    dead: set[int],
    record_property: Callable[[str, object], None],
) -> None:
    arguments = tiny(pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True, train_iters=40)
    reference = jobs.reference(arguments, workers=4)
    first, node0, node1, standby = begun(jobs, tmp_path, place, arguments)
    first.await_event("iteration", iteration=3)
    assert "losing the coordinator ends the job unless another takes its place" in first.output()
    if also == "a worker before":
        os.kill(first.worker_pids()[3], signal.SIGKILL)
        first.await_event("epoch_broken")  # somewhere between reports and Go
    first.kill()
    lost_at = time.time()
    if also == "node 0":
        node0.kill()
    standby.await_event("coordinator_replaced")
    check_training(standby.wait(), reference)
    if also == "node 0":
        next_step_at = min(event["time"] for event in standby.events("iteration") if event["time"] > lost_at)
        record_property("node0_next_step_s", round(next_step_at - lost_at - place.lease_s, 2))
    assert {death.worker for death in standby.summary.deaths} == dead
    assert node1.wait().code == 0, node1.output()
    assert main(["replay", str(standby.run_dir)]) == 0
