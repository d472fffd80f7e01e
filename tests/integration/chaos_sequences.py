# SPDX-License-Identifier: Apache-2.0
"""Random sequences of what may befall a job, by seed, for test_chaos.py. Starts no processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from chaos_casts import CASTS, ITERATIONS, MIGRATING, SHARING_CASTS, Cast
from chaos_plans import random_plan, random_sharing_plan

from megatron_resihp.config import INJECTION_POINTS
from megatron_resihp.plan import ParallelPlan

FIRST_SHARING = 1000
"""From this seed on, workers of jobs share experts, sequences or both."""
RECOVERY_POINTS = tuple(point for point in INJECTION_POINTS if point.startswith("recovery-") and point != MIGRATING)
"""Which every worker reaches in every recovery; the remaining one is reached by those whose state moves."""
SPEEDS = (0.2, 0.5, 0.8)
LONG_PAUSE_S = 9.0
"""Far longer than a heartbeat may be late: who wakes up then has been given up for dead."""
HEARTBEAT_S = 6.0


@dataclass(frozen=True)
class Strike:
    """A signal from outside, at no named point of the program.

    Attributes:
        after: name of the event that it follows.
        number: which of these events, from 0.
        delay_s: how long after it.
        action: "kill", "stop" or "pause": stopped, and continued later.
        pause_s: of "pause", how long.
    """

    after: str
    number: int
    delay_s: float
    action: str
    worker: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class Sequence:
    """What happens to a job.

    Attributes:
        plans: asked for at iterations.
        injections: as --resihp-inject has them.
        strikes: from outside.
        rests: iterations in which all wait until those that died have come back.
    """

    cast: Cast
    distributed_optimizer: bool
    restarts: int
    plans: tuple[tuple[int, ParallelPlan], ...]
    injections: tuple[str, ...]
    strikes: tuple[Strike, ...]
    rests: tuple[int, ...]


def random_sequence(seed: int) -> Sequence:
    """Half of the seeds have the distributed optimizer, half have workers that come back."""
    casts = CASTS if seed < FIRST_SHARING else SHARING_CASTS
    cast = casts[seed // 4 % len(casts)]
    return _Author(Random(seed), Random(~seed), cast, seed % 4 >= 2, 2 * (seed % 2)).write()


@dataclass
class _Author:
    """Writes a sequence, iteration by iteration. What it thinks of who is alive may turn out wrong: some die later than
    they were to, or never. Plans that name the dead, and are refused, belong to what a job has to bear."""

    random: Random
    aside: Random
    """For what was thought of later: all else stays what a seed has been."""
    cast: Cast
    distributed_optimizer: bool
    restarts: int
    living: list[int] = field(init=False)
    gone: list[int] = field(default_factory=list)
    deaths: int = 0
    slowed: bool = False
    plans: list[tuple[int, ParallelPlan]] = field(default_factory=list)
    injections: list[str] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.living = list(range(self.cast.workers))

    def write(self) -> Sequence:
        for iteration in range(1, ITERATIONS + 1):
            self._rest(iteration)
            for chance, happen in (
                (0.30, self._ask_for_a_plan), (0.20, self._injection), (0.15, self._slow), (0.18, self._strike)
            ):  # fmt: skip
                if self.random.random() < chance:
                    happen(iteration)
        return Sequence(
            self.cast, self.distributed_optimizer, self.restarts,
            tuple(self.plans), tuple(self.injections), tuple(self.strikes), tuple(self.rests),
        )  # fmt: skip

    def _rest(self, iteration: int) -> None:
        if not self.gone or not self.restarts or iteration % 4:
            return
        self.rests.append(iteration)
        returned = [worker + self.cast.workers for worker in self.gone]
        self.living += [worker for worker in returned if worker < self.cast.workers * (self.restarts + 1)]
        self.gone = []

    def _ask_for_a_plan(self, iteration: int) -> None:
        if self.cast.shares:
            plan = random_sharing_plan(self.random, self.living, self.cast)
        else:
            plan = random_plan(self.random, self.living, self.cast.micro_batches)
        self.plans.append((iteration, plan))

    def _injection(self, iteration: int) -> None:
        action = self.random.choices(("rebuild", "kill", "stop"), (4, 4, 1))[0]
        self._add_injection(action, iteration, self.random.choice(self.cast.points))
        if self.random.random() < 0.3:  # in the midst of what follows
            action = self.random.choices(("rebuild", "kill"), (1, 2))[0]
            point = self.random.choice(RECOVERY_POINTS)
            self._add_injection(action, iteration, MIGRATING if self.aside.random() < 0.3 else point)

    def _add_injection(self, action: str, iteration: int, point: str) -> None:
        victim = self._victim(lethal=action != "rebuild")
        if victim is not None:
            self.injections.append(f"{action}:{victim}@{iteration}:{point}")

    def _victim(self, lethal: bool) -> int | None:
        victim = self.random.choice(self.living)
        if lethal and (self.deaths == self.cast.most_deaths + self.restarts or len(self.living) == 1):
            return None
        if lethal:
            self.deaths += 1
            self.living.remove(victim)
            self.gone.append(victim)
        return victim

    def _slow(self, iteration: int) -> None:
        if self.slowed and self.random.random() < 0.5:
            self.injections.append(f"clear@{iteration}")
        else:
            self.injections.append(f"slow:{self.random.choice(self.living)}:{self.random.choice(SPEEDS)}@{iteration}")
        self.slowed = not self.injections[-1].startswith("clear")

    def _strike(self, iteration: int) -> None:
        action = self.random.choices(("kill", "stop", "pause"), (4, 1, 3))[0]
        pause_s = self.random.choice((0.3, 1.0, 2.0, LONG_PAUSE_S)) if action == "pause" else 0.0
        victim = self._victim(lethal=action != "pause" or pause_s == LONG_PAUSE_S)
        if victim is None:
            return
        # Either at any moment of an iteration, or in the midst of a change or recovery, if there is one by then.
        cues = ("epoch_broken", "plan_change", *(("worker_restarted",) if self.restarts else ()))
        moments = [("iteration", iteration), *((cue, self.random.randrange(3)) for cue in cues)]
        after, number = self.random.choice(moments)
        self.strikes.append(Strike(after, number, self.random.uniform(0.0, 0.7), action, victim, pause_s))
