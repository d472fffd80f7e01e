#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a death takes node 0 in a job of 10,000 workers: its store, its coordinator and their log of decisions.

They run in this process as in a job's. The workers are synthetic. A second process speaks for all of them, by one
connection for each node of 8 (TP 8, PP 10), through the code by which an agent relays what its workers say. It starts
the job, tells of a death, sends the survivors' reports as soon as it has read that the epoch is broken, and says that
the members are ready. Agents join their workers' reports, each on its own node, all at the same time. So that is done
before the death here, and `agent_ms` is what one of them takes: the CPU time, and how long a first report may wait for
others. What workers read, and the detector's share of node 0, are not in here.

`new_plan_s` is from the word of the death to the published plan, with an agent's time added, `go_s` from the first
member that is ready to *go*, by the clock, with both processes on the same cores. `new_plan_cpu_s` and `go_cpu_s` are
the CPU seconds of node 0's process in that time. `decisions_mib` is the log's size, `memory_mib` the most that node 0's
process had in memory.

May import `megatron_resihp` without torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_result

from megatron_resihp.control import keys
from megatron_resihp.control.commands.launch.open_files import allow_as_many_as_may_be
from megatron_resihp.control.coordination.coordinator import Coordinator
from megatron_resihp.control.head.decision_file import FILE_NAME, DecisionFile
from megatron_resihp.control.job_size import JobSize
from megatron_resihp.control.transport.access.secret import Secret, fresh_secret
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.transport.sockets import StoreError, reserve
from megatron_resihp.control.transport.store.client import Direct, StoreClient, connect
from megatron_resihp.control.transport.store.line import Line
from megatron_resihp.control.transport.store.questions import Gathering, gathering_s
from megatron_resihp.control.transport.store.server import StoreServer
from megatron_resihp.control.transport.store.wire import Op, Request, Said
from megatron_resihp.plan import Chunk, ParallelPlan
from megatron_resihp.plan.replica import shards_at
from megatron_resihp.protocol.job import JobDescription
from megatron_resihp.protocol.messages import MESSAGES, JobStarted, Message, ProcessExited, Ready, SurvivorReport
from megatron_resihp.protocol.published import DECISIONS, EpochPlan
from megatron_resihp.protocol.records import IterationPhase, Outcome, Record
from megatron_resihp.protocol.together import Together

GOAL_NEW_PLAN_S: Final = 1.0
TENSOR_PARALLEL: Final = 8
STAGES: Final = 10
LAYERS_OF_STAGE: Final = 8
PER_REPLICA: Final = 8
"""Micro-batches at the start."""
WAIT_S: Final = 60.0
VICTIM: Final = 17


Requests = dict[int, list[Request]]
"""Node → what its workers ask."""
COUNTERS: Final[dict[str, Any]] = {
    "iteration": 5, "consumed_train_samples": 40_000, "skipped_train_samples": 0, "consumed_valid_samples": 0,
    "scheduler_steps": 40_000, "settings": {
        "scheduler": {
            "max_lr": 0.001, "lr_warmup_steps": 3840, "lr_decay_style": "cosine", "lr_decay_steps": 384_000,
            "min_lr": 6.667e-05, "start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant",
            "wd_incr_steps": 192_000,
        },
        "groups": {"betas": [0.9, 0.999], "eps": 1e-08}, "scale": {},
    },
    "flops": 1308622848.0, "totals": {"advanced iterations": 0, "skipped iterations": 0, "nan iterations": 0},
    "predicted": {},
}  # fmt: skip
"""As a worker reports them."""


class Crowd:
    """All nodes of a job.

    Args:
        nodes: how many, each with `TENSOR_PARALLEL` workers.
    """

    def __init__(self, nodes: int, address: Address, secret: Secret) -> None:
        self._numbers = count(1)
        self._selector = selectors.DefaultSelector()
        way = Direct(address, secret)
        self._together = [Together(f"node {node}") for node in range(nodes)]
        self._lines = [Line(address, *way.open(address, WAIT_S), Gathering(each)) for each in self._together]
        for line in self._lines:
            self._selector.register(line, selectors.EVENT_READ, line)

    def written(self, messages: Iterable[Message]) -> Requests:
        """What each worker asks of its agent."""
        requests: Requests = {}
        for each in messages:
            worker: int = each.worker  # type: ignore[union-attr]
            text = MESSAGES.write(each, f"worker {worker}", f"synthetic.{next(self._numbers)}")
            push = Request(Op.PUSH, (keys.INBOX.encode(), text.encode()))
            requests.setdefault(worker // TENSOR_PARALLEL, []).append(push)
        return requests

    def joined(self, requests: Requests) -> Requests:
        """What agents send in place of their workers' reports, which they have all gathered."""
        return {
            node: [
                Request(Op.PUSH, (keys.INBOX.encode(), text))
                for _, text in self._together[node].told([push.fields[1] for push in pushes])
            ]
            for node, pushes in requests.items()
        }

    def tell(self, requests: Requests) -> None:
        """Send them, all nodes at once; returns when the store has them."""
        for node, pushes in requests.items():
            for place, push in enumerate(pushes):
                self._lines[node].ask(place, push, time.monotonic())
        left = sum(map(len, requests.values()))
        while left:
            ready = self._selector.select(WAIT_S)
            if not ready:
                raise RuntimeError("the store does not answer")
            for key, _ in ready:
                told = key.data.hear(time.monotonic())
                if any(reply.said is not Said.YES for _, reply in told):
                    raise RuntimeError("the store has refused a message")
                left -= len(told)


class Job:
    """What the synthetic workers say."""

    def __init__(self, replicas: int) -> None:
        self.workers = replicas * STAGES * TENSOR_PARALLEL
        self._own = tuple(
            Chunk(stage, stage * LAYERS_OF_STAGE, (stage + 1) * LAYERS_OF_STAGE) for stage in range(STAGES)
        )
        self._description = JobDescription(
            TENSOR_PARALLEL, STAGES, replicas * PER_REPLICA, self._own, 4096, True, True
        )  # fmt: skip

    def started(self) -> list[JobStarted]:
        return [JobStarted(worker, self._description) for worker in range(self.workers)]

    def ready(self, plan: ParallelPlan, epoch: int) -> list[Ready]:
        port = 40_000
        return [
            Ready(worker, epoch, self._digests(plan, worker), (port + worker % TENSOR_PARALLEL,), 0, 0)
            for worker in plan.members
        ]

    def _digests(self, plan: ParallelPlan, worker: int) -> dict[str, str]:
        coordinate = plan.coordinate_of(worker)
        if coordinate is None:
            return {}
        return {f"{coordinate.stage}/{coordinate.tp_rank}": f"{coordinate.stage:032x}"}

    def reports(self, plan: ParallelPlan) -> Iterator[SurvivorReport]:
        """All were computing iteration 6."""
        outcome = Outcome(0, 1.0, ((12.0, 4096.0),), ("lm loss",))
        counters = {5: COUNTERS, 6: COUNTERS}
        for worker in plan.members:
            coordinate = plan.coordinate_of(worker)
            if worker != VICTIM and coordinate is not None:
                record = Record(6, IterationPhase.COMPUTE, True, {5: outcome}, counters, 0, ("lm loss",))
                held = shards_at(self._own, coordinate, TENSOR_PARALLEL)
                yield SurvivorReport(worker, 0, record, held, times=_times(worker))


def _times(worker: int) -> dict[int, dict[str, float]]:
    """By the worker's own clock."""
    return {n: {"interval_s": 0.06918239 + worker / 1e7, "started": 1795759941.7063 + worker / 1e4} for n in (5, 6)}


def play(replicas: int, address: Address, secret: Secret, told: Any) -> None:
    """The workers' side, in a process of its own. `told`: a pipe that takes a word at each moment, and the figures."""
    allow_as_many_as_may_be()
    job = Job(replicas)
    crowd = Crowd(job.workers // TENSOR_PARALLEL, address, secret)
    store = connect(address, secret, WAIT_S)
    moments: list[float] = []

    def now() -> None:
        told.send(None)
        moments.append(time.monotonic())

    crowd.tell(crowd.written(job.started()))
    first = _plan(store, 0)
    crowd.tell(crowd.written(job.ready(first, 0)))
    store.get(keys.go_key(0), WAIT_S)
    notice, each = _notices(store), crowd.written(job.reports(first))
    began = time.process_time()
    reports = crowd.joined(each)
    agent_s = (time.process_time() - began) / len(each) + gathering_s(len(each))
    death = crowd.written([ProcessExited(VICTIM, -9, time.time())])
    now()
    crowd.tell(death)
    store.get(keys.notice_key(notice), WAIT_S)
    crowd.tell(reports)
    text = store.get(keys.plan_key(1), WAIT_S)
    now()
    ready = crowd.written(job.ready(_read(text), 1))
    now()
    crowd.tell(ready)
    store.get(keys.go_key(1), WAIT_S)
    now()
    died, planned, again, gone = moments
    told.send({
        "workers": job.workers, "connections": job.workers // TENSOR_PARALLEL, "agent_ms": agent_s * 1e3,
        "new_plan_s": planned - died + agent_s, "go_s": gone - again, "plan_kib": len(text) / 1024,
    })  # fmt: skip


def _plan(store: StoreClient, epoch: int) -> ParallelPlan:
    return _read(store.get(keys.plan_key(epoch), WAIT_S))


def _read(text: str) -> ParallelPlan:
    decision = DECISIONS.read(text).body
    assert isinstance(decision, EpochPlan)
    return decision.plan


def _notices(store: StoreClient) -> int:
    """How many notices there are."""
    number = 0
    while store.check(keys.notice_key(number)):
        number += 1
    return number


def measure(replicas: int, directory: Path) -> dict[str, Any]:
    """Run node 0 here, and the workers in a process of their own."""
    allow_as_many_as_may_be()
    secret, listener = fresh_secret(), reserve("127.0.0.1", 0)
    address = Address("127.0.0.1", listener.getsockname()[1])
    server = StoreServer(listener, secret)
    decisions = DecisionFile(directory)
    nodes = replicas * STAGES
    coordinator = Coordinator(
        connect(address, secret, WAIT_S), lambda event: None, JobSize(nodes, TENSOR_PARALLEL), [],
        write_decision=decisions.write,
    )  # fmt: skip
    threading.Thread(target=_serve, args=(coordinator,), daemon=True).start()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    workers = context.Process(target=play, args=(replicas, address, secret, theirs), daemon=True)
    workers.start()
    theirs.close()
    used: list[float] = []
    while not isinstance(said := _received(ours), dict):
        used.append(time.process_time())
    workers.join(WAIT_S)
    server.close()
    decisions.close()
    died, planned, again, gone = used
    return said | {
        "new_plan_cpu_s": planned - died, "go_cpu_s": gone - again,
        "decisions_mib": (directory / FILE_NAME).stat().st_size / 2**20,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def _serve(coordinator: Coordinator) -> None:
    with suppress(StoreError):  # of a store that is closed, at the end
        coordinator.run()


def _received(pipe: Any) -> Any:
    """Raises RuntimeError if nothing comes."""
    try:
        if pipe.poll(2 * WAIT_S):
            return pipe.recv()
    except EOFError:
        pass
    raise RuntimeError("the workers' process has failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=125, help="of 80 workers (default 125: 10,000 workers)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options.replicas, Path(directory))
    result["load_average"] = load_average()
    if result["new_plan_s"] > GOAL_NEW_PLAN_S:
        print(f"a plan takes more than {GOAL_NEW_PLAN_S:g} s", file=sys.stderr)
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
