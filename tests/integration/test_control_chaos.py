# SPDX-License-Identifier: Apache-2.0
"""Random losses of coordinators, etcd's members, nodes, workers and links, by seed: training stays the same.

RESIHP_CONTROL_CHAOS=100 runs that many sequences in place of the sample; RESIHP_CONTROL_CHAOS=17-20 just those.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from control_chaos import ITERATIONS, LEASE_S, LONGEST_CUT_S, MEMBERS, NODES, Blow, random_blows
from etcds import Etcd, needs_etcd
from jobs import Job, Jobs, check_training, tiny
from launched import is_alive
from networks import THIS_MACHINE, Network, needs_namespaces

from megatron_resihp.cli import main
from megatron_resihp.control import exit_codes
from megatron_resihp.control.head.decision_logs import decisions_at

pytestmark = [pytest.mark.nightly, needs_etcd, needs_namespaces]
SAMPLE = "0-3"
BOUND_S = 240.0
"""Far beyond what a sequence takes on a busy machine."""
LONGEST_SILENCE_S = 30.0
_PORTS = iter(range(20_000 + os.getpid() % 5_000, 32_000))
"""Below those from which Linux takes ports for connections."""
STEPS = frozenset(("epoch_started", "iteration", "agreed", "run_finished"))


def seeds() -> range:
    first, _, last = os.environ.get("RESIHP_CONTROL_CHAOS", SAMPLE).partition("-")
    return range(int(first), int(last) + 1) if last else range(int(first))


@pytest.mark.timeout(2 * BOUND_S)
@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens_to_those_that_decide(
    jobs: Jobs, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    arguments = tiny(train_iters=ITERATIONS, global_batch_size=6)
    reference = jobs.reference(arguments, workers=1)
    with stage_of(jobs, tmp_path, arguments) as stage:
        stage.play(random_blows(seed))
        check(stage, reference)
        record_property("chaos_longest_silence_s", round(silence(stage.leader), 1))


@pytest.mark.timeout(2 * BOUND_S)
def test_a_long_cut_loses_a_node_if_nothing_else_happens(jobs: Jobs, tmp_path: Path) -> None:
    """So the sequences' cuts are no empty threat. While a coordinator takes over, a node has longer to come back."""
    with stage_of(jobs, tmp_path, tiny(train_iters=ITERATIONS, global_batch_size=6)) as stage:
        stage.play((Blow(5, 0.0, "cut", "link", 1, LONGEST_CUT_S),))
        deaths = stage.leader.events("worker_dead")
        assert [(death["dead"], death["node"]) for death in deaths] == [(1, 1)], stage.said()
        assert stage.leader.code == 0, stage.said()


@contextmanager
def stage_of(jobs: Jobs, path: Path, arguments: list[str]) -> Iterator[Stage]:
    """A stage on machines that reach etcd, as nodes of a job do."""
    with ExitStack() as stack:
        network = stack.enter_context(closing(Network(NODES)))
        etcd = stack.enter_context(closing(Etcd(path, MEMBERS, host=network.connect_this_machine())))
        stage = Stage(jobs, path, arguments, etcd, network)
        stack.callback(stage.clear)
        yield stage


def check(stage: Stage, reference: Job) -> None:
    """Training is the reference's; nothing has stood still for long; and the log in etcd is whole."""
    check_training(stage.leader, reference)
    assert silence(stage.leader) <= LONGEST_SILENCE_S, stage.said()
    assert decisions_at(str(stage.place)) == decisions_at(str(stage.leader.run_dir))
    assert main(["replay", str(stage.place)]) == 0
    # Nodes that were cut off end last, and all launchers know of their workers by the one run directory.
    for each in (*stage.cut_off, *stage.nodes, *stage.coordinators):
        if each not in stage.lost:
            fine = (0, exit_codes.RETRY) if each in stage.cut_off else (0,)
            assert each.wait().code in fine, stage.said()
    for each in stage.deposed:
        assert each.wait().code == exit_codes.RETRY, stage.said()


def silence(job: Job) -> float:
    """The most seconds without a step."""
    times = sorted(event["time"] for event in job.events() if event["event"] in STEPS)
    return float(max(later - sooner for sooner, later in pairwise(times)))


class Stage:
    """A job of several nodes, with a coordinator and one that waits for its loss, and what befalls them.

    Attributes:
        place: of decisions, in etcd.
        leader: the coordinator that leads, as far as is known.
        lost: jobs that were killed, and coordinators in whose place another has come.
        deposed: those of them that still run, and are to find out.
        cut_off: nodes whose links were cut. They may be given up, and end.
    """

    def __init__(self, jobs: Jobs, path: Path, arguments: list[str], etcd: Etcd, network: Network) -> None:
        self._path, self._arguments, self._etcd, self._network = path, arguments, etcd, network
        self.place = replace(etcd.location(), lease_s=LEASE_S)
        self._nursery, self._leads = jobs.nursery, {"alone": True, "control": str(self.place)}
        self.lost: list[Job] = []
        self.deposed: list[Job] = []
        self.cut_off: list[Job] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._takeovers = 0
        self._away = set[int]()
        """Members of etcd."""
        self.nodes: list[Job] = []
        first = self._options()
        self.leader = jobs.start(arguments, **self._leads, **first)
        self.coordinators = [self.leader]
        self._serve_until(lambda: "which join with" in self.leader.output())
        names = network.names
        self.nodes += [self._start(f"node{node}", node=node, network=names[node], **first) for node in range(NODES)]
        self._wait_for_another()
        self._serve_until(lambda: self.leader.events("iteration"))

    def play(self, blows: tuple[Blow, ...]) -> None:
        """Let the job train to its end, through all this."""
        waiting, until = list(blows), time.monotonic() + BOUND_S

        def over() -> bool:
            now, reached = time.monotonic(), max(event["iteration"] for event in self.leader.events("iteration"))
            while waiting and waiting[0].iteration <= reached:
                blow = waiting.pop(0)
                self._due.append((now + blow.delay_s, lambda blow=blow: self._strike(blow)))
            for due in [due for due in self._due if due[0] <= now]:
                self._due.remove(due)
                due[1]()
            self._see_takeovers()
            return self.leader not in self.lost and self.leader.code is not None and not self._due

        assert self._nursery.serve_until(over, until), f"it did not end within {BOUND_S:g} s\n{self.said()}"

    def clear(self) -> None:
        for each in (*self.coordinators, *self.nodes):
            each.kill()

    def said(self) -> str:
        """What everybody has printed."""
        return "\n".join(f"---- {each.run_dir.name}\n{each.output()}" for each in (*self.coordinators, *self.nodes))

    def _strike(self, blow: Blow) -> None:
        if blow.target == "member":
            self._strike_member(blow)
        elif blow.target == "worker":
            self._send(self.leader.worker_pids().get(blow.number), signal.SIGKILL)
        elif blow.target == "link":
            self._cut(blow.number, blow.other, blow.lasts_s)
        elif blow.target == "node":
            self.lost.append(self.nodes[blow.number])
            self.nodes[blow.number].kill()
        elif self.leader.code is None and len(self.coordinators) > len(self.lost) + 1:
            self._strike_leader(blow)

    def _strike_leader(self, blow: Blow) -> None:
        leader = self.leader
        if blow.what == "kill":
            self.lost.append(leader)
            leader.kill()
            return
        self._send(leader.pid, signal.SIGSTOP)
        self._later(blow.lasts_s, lambda: self._send(leader.pid, signal.SIGCONT))

    def _cut(self, node: int, other: int | None, lasts_s: float) -> None:
        """The link between two nodes, or between a node and the coordinators."""
        self.cut_off += [self.nodes[each] for each in (node, other) if each is not None]
        if other is None:
            self._network.separate_from_this_machine(node)
            self._later(lasts_s, lambda: self._network.join_this_machine(node))
        else:
            self._network.separate(node, other)
            self._later(lasts_s, lambda: self._network.join(node, other))

    def _strike_member(self, blow: Blow) -> None:
        if blow.number in self._away:
            return
        strike, mend = {
            "kill": (self._etcd.kill, self._etcd.begin), "pause": (self._etcd.pause, self._etcd.go_on)
        }[blow.what]  # fmt: skip
        self._away.add(blow.number)
        strike(blow.number)

        def come_back() -> None:
            mend(blow.number)
            self._away.remove(blow.number)

        self._later(blow.lasts_s, come_back)

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + delay_s, what))

    def _send(self, pid: int | None, number: signal.Signals) -> None:
        if pid is not None and is_alive(pid):
            os.kill(pid, number)

    def _see_takeovers(self) -> None:
        """Another leads: one more is to wait. If the job had been decided to end, it has only told so and has ended."""
        if self.leader in self.lost and self.coordinators[-1].code is not None:
            self.leader = self.coordinators[-1]
            return
        if len(self.leader.events("coordinator_replaced")) == self._takeovers:
            return
        self._takeovers += 1
        if self.leader not in self.lost:
            self.lost.append(self.leader)
            self.deposed.append(self.leader)
        self.leader = self.coordinators[-1]
        self._wait_for_another()

    def _wait_for_another(self) -> None:
        name = f"coordinator{len(self.coordinators)}"
        self.coordinators.append(self._start(name, standby=True, **self._leads, **self._options()))

    def _options(self) -> dict[str, Any]:
        return {
            "workers": 1,
            "nodes": NODES,
            "coordinator": [THIS_MACHINE, self._free_port()],
            "heartbeat_timeout_s": 6.0,
        }

    def _start(self, name: str, **options: Any) -> Job:
        (self._path / name).symlink_to(self.leader.run_dir)  # by this name the nursery tells it from others
        return self._nursery.start(self._path / name, self._arguments, **options)

    def _serve_until(self, test: Callable[[], Any]) -> None:
        assert self._nursery.serve_until(test, time.monotonic() + BOUND_S / 2), self.said()

    def _free_port(self) -> int:
        """One that no outgoing connection takes meanwhile."""
        for port in _PORTS:
            with suppress(OSError), socket.create_server((THIS_MACHINE, port)):
                return port
        raise AssertionError("no port is free")
