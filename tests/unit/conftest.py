# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests: a run that never happened, written event by event."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings

from megatron_resihp.events.codec import read_event
from megatron_resihp.events.event import Event

# Several jobs may share the cores that the tests run on: no example is wrong for being slow.
settings.register_profile("resihp", deadline=None, max_examples=60)
settings.load_profile("resihp")

Line = dict[str, Any]


class SyntheticRun:
    """Events as a run of 8 workers would write them.

    Attributes:
        lines: of the log, as they are on disk.
    """

    def __init__(self, train_iters: int = 40, batch: int = 16, first_iteration: int = 0, seed: int = 0) -> None:
        self.lines: list[Line] = []
        self.batch = batch
        self.now = 1_750_000_000.0
        self.epoch = 0
        self.iteration = first_iteration
        self.random = random.Random(seed)
        self.replicas = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        self.standbys: list[int] = []
        self.work: list[dict[str, Any]] = [{"micro_batches": []}, {"micro_batches": []}]
        self.died_at: list[float] = []
        self._fresh_reporter = True
        self.write("run_started", world_size=8, nnodes=2, nproc_per_node=4, command=["pretrain_gpt.py"])
        self.write("epoch_started", plan=self.plan(), digest="d0")
        self.write(
            "job",
            worker=0,
            tensor_parallel=2,
            pipeline_parallel=2,
            micro_batch_size=2,
            global_batch_size=batch,
            micro_batches=batch // 2,
            seq_length=64,
            train_iters=train_iters,
        )

    def write(self, name: str, worker: int | None = None, **fields: Any) -> Line:
        line = {"event": name, "time": self.now, "epoch": self.epoch, "worker": worker, **fields}
        self.lines.append(line)
        return line

    @property
    def events(self) -> list[Event]:
        """What a reader takes the lines for."""
        return [read_event(line) for line in self.lines]

    def plan(self) -> dict[str, Any]:
        replicas = [{"stages": stages, **self.work[number]} for number, stages in enumerate(self.replicas)]
        return {"replicas": replicas, "standbys": {str(worker): [0, 0] for worker in self.standbys}}

    def feed(self, iteration: int, ranges: Sequence[Sequence[int]] | None = None) -> None:
        """One attempt: each replica feeds its part of the iteration's samples, or replica 0 all of `ranges`."""
        first, last = (iteration - 1) * self.batch, iteration * self.batch - 1
        middle = first + self.batch // len(self.replicas)
        parts = [ranges] if ranges else [[[first, middle - 1]], [[middle, last]]][: len(self.replicas)]
        if len(self.replicas) == 1 and not ranges:
            parts = [[[first, last]]]
        for replica, part in enumerate(parts):
            self.write("samples", worker=0, iteration=iteration, replica=replica, samples=part, micro_batches=[])

    def step(self, iterations: int = 1, seconds: float = 0.25, **fields: Any) -> None:
        """Iterations that all workers agree on."""
        for _ in range(iterations):
            self.iteration += 1
            self.feed(self.iteration)
            took = seconds * self.random.uniform(0.97, 1.03)
            self.now += took
            loss = 3 + 7 * math.exp(-self.iteration / 12) + 0.05 * self.random.random()
            values = {
                "iteration": self.iteration,
                "loss": {"lm loss": loss},
                "grad_norm": 1.5,
                "skipped": False,
                "samples": self.batch,
                "duration_s": None if self._fresh_reporter else took,
                **fields,
            }
            self._fresh_reporter = False
            self.write("iteration", worker=7, **values)

    def die(self, worker: int, cause: str = "exit signal 9", noticed_after: float = 0.012, node: int = 0) -> None:
        died_at = self.now
        self.died_at.append(died_at)
        self.now += noticed_after
        self.write("worker_dead", dead=worker, node=node, cause=cause, died_at=died_at, noticed_at=self.now)

    def recover(
        self,
        dead: Sequence[int],
        replicas: list[list[list[int]]],
        standbys: list[int],
        seconds: float = 0.468,
        bytes_moved: int = 0,
        redo: bool = True,
    ) -> None:
        """The epoch breaks during the next iteration, and all go on under a new plan."""
        broken_at = self.now
        self.write("epoch_broken", cause=f"worker {dead[0]} died", broken_epoch=self.epoch, by=None)
        if redo:
            self.feed(self.iteration + 1)
        self.write("agreed", iteration=self.iteration, loss={"lm loss": 1.0}, grad_norm=1.5, skipped=False)
        self.epoch += 1
        self.replicas, self.standbys = replicas, standbys
        phases = {
            "notice": 0.1,
            "abort": 0.15,
            "agree": 0.02,
            "rebuild": 0.5,
            "migrate": 0.01,
            "data": 0.05,
            "ready": 0.02,
        }
        for worker in (0, 1):
            for phase, share in phases.items():
                spent = seconds * share * (1 + worker / 10)
                self.write("phase", worker=worker, phase=phase, seconds=spent, to_epoch=self.epoch)
        self.now += seconds
        self.write("epoch_started", plan=self.plan(), digest=f"d{self.epoch}")
        self.write(
            "recovery",
            from_epoch=self.epoch - 1,
            to_epoch=self.epoch,
            resumed_iteration=self.iteration,
            dead=list(dead),
            bytes_moved=bytes_moved,
            steps_redone=int(redo),
            broken_at=broken_at,
            resumed_at=self.now,
        )
        self._fresh_reporter = True

    def change(
        self, why: str, replicas: list[list[list[int]]], work: Sequence[dict[str, Any]] | None = None,
        seconds: float = 0.2,
    ) -> None:  # fmt: skip
        """All go on under another plan, without a death; `work` is what each replica does beside its stages."""
        left_at = self.now
        self.now += seconds
        self.epoch += 1
        self.replicas, self.standbys = replicas, []
        self.work = [*(work or [{"micro_batches": []}] * len(replicas))]
        self.write("epoch_started", plan=self.plan(), digest=f"d{self.epoch}")
        self.write(
            "reconfiguration",
            number=self.epoch,
            why=why,
            from_epoch=self.epoch - 1,
            to_epoch=self.epoch,
            resumed_iteration=self.iteration,
            bytes_moved=1000,
            steps_redone=0,
            left_at=left_at,
            resumed_at=self.now,
            stood_still_s=seconds,
        )

    def first_step(self, since_death: float) -> None:
        """Every worker says when its first iteration after the recovery was complete."""
        died_at = min(self.died_at)
        self.died_at = []
        for worker in (7, 4):
            self.write("first_step", worker=worker, to_epoch=self.epoch, iteration=self.iteration)["time"] = (
                died_at + since_death
            )

    def finish(self, exit_code: int = 0, reason: str = "reached the last iteration") -> None:
        self.write("run_finished", exit_code=exit_code, reason=reason)


@pytest.fixture
def synthetic_run() -> Callable[..., SyntheticRun]:
    """Makes an empty run to write events to."""
    return SyntheticRun


@pytest.fixture
def changed_run() -> SyntheticRun:
    """40 iterations; worker 3 dies after the 5th and comes back as 11 after the 10th; worker 6 is slow from the 16th on
    and has less to do from the 21st on; it is well again from the 26th on, and does its own work from the 31st on."""
    run = SyntheticRun()
    whole = [[[0, 1], [2, 11]], [[4, 5], [6, 7]]]
    run.lines[-1] |= {"chunks": [[0, 0, 3], [1, 3, 6]]}
    run.step(5)
    run.die(3)
    run.recover([3], replicas=[[[0, 1], [2]], [[4, 5], [6, 7]]], standbys=[])
    run.step(5)
    run.write("worker_waiting", waiting=11, place=3)
    run.change("worker 11 came back", whole)
    run.step(10)
    run.write("verdict", kind="compute", change="onset", workers=[6], speed=0.5, since=16, iteration=18)
    run.change("worker 6 at 0.50: iterations 30 % shorter", whole, [
        {"micro_batches": [0, 1, 2, 3, 4]},
        {"micro_batches": [5, 6, 7], "chunks": [[0, 0, 4], [1, 4, 6]]},
    ])  # fmt: skip
    run.step(10)
    run.write("verdict", kind="compute", change="recovery", workers=[6], speed=1.0, since=26, iteration=29)
    run.change("all workers are healthy: iterations 20 % shorter", whole)
    run.step(10)
    run.finish()
    return run


@pytest.fixture
def recovered_run() -> SyntheticRun:
    """40 iterations; worker 3 dies after the 10th, node 1 with what is left of it after the 25th."""
    run = SyntheticRun()
    run.step(10, seconds=0.25)
    run.die(3)
    run.recover([3], replicas=[[[4, 5], [6, 7]]], standbys=[0, 1, 2], seconds=0.468)
    run.step(1, seconds=0.45)
    run.first_step(0.93)
    run.step(14, seconds=0.45)
    run.die(5, "node lost", 0.8, node=1)
    run.die(6, "node lost", 0.0, node=1)
    run.recover([5, 6], replicas=[[[0, 1], [2, 7]]], standbys=[4], seconds=0.9, bytes_moved=2_345_678)
    run.step(1, seconds=0.45)
    run.first_step(2.25)
    run.step(14, seconds=0.45)
    run.finish()
    return run
