# SPDX-License-Identifier: Apache-2.0
"""Which workers are slowed on request: the coordinator keeps this state, and tells workers and agents. Pure.

May import `config`, `protocol` and the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron_resihp.config import ConfigError, Slowdown
from megatron_resihp.protocol.notices import SlownessChanged


@dataclass(frozen=True)
class Slowness:
    """Factors in (0, 1] of what is slowed; everything else has 1.

    Attributes:
        speeds: by worker.
        links: by pair of workers, the smaller id first.
    """

    speeds: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def speed(self, worker: int) -> float:
        return self.speeds.get(worker, 1.0)

    def link(self, one: int, other: int) -> float:
        return self.links.get((min(one, other), max(one, other)), 1.0)

    def after(self, slowdown: Slowdown) -> Slowness:
        """What holds once a slowdown has come on top."""
        match slowdown.workers:
            case (worker,):
                return Slowness(_changed(self.speeds, worker, slowdown.factor), self.links)
            case (one, other):
                return Slowness(self.speeds, _changed(self.links, (min(one, other), max(one, other)), slowdown.factor))
            case _:
                return Slowness()

    @classmethod
    def of(cls, notice: SlownessChanged) -> Slowness:
        """What a notice says."""
        return cls(dict(notice.speeds), {(one, other): factor for one, other, factor in notice.links})


def _changed[Key](factors: Mapping[Key, float], key: Key, factor: float) -> dict[Key, float]:
    others = {each: value for each, value in factors.items() if each != key}
    return others if factor == 1.0 else {**others, key: factor}


@dataclass
class SlownessDesk:
    """The coordinator's part: takes requests and knows what holds.

    Attributes:
        workers: how many the job has.
        emulated: whether their clock is; None until a worker has said so.
        on_devices: whether they have devices, which work on while a process is stopped.
    """

    workers: int
    emulated: bool | None = None
    on_devices: bool = False
    holds: Slowness = field(default_factory=Slowness)
    _scheduled: set[int] = field(default_factory=set)

    def take(self, slowdown: Slowdown, dead: Collection[int], living: Collection[int] = ()) -> None:
        """Change what holds.

        Args:
            dead: workers that are.
            living: workers that have work or stand by, also such as were started anew.

        Raises:
            ConfigError: with one line, if it cannot be.
        """
        if self.emulated is None:
            raise ConfigError("the job is still starting; try again when it trains")
        for worker in slowdown.workers:
            if worker >= self.workers and worker not in {*living, *dead}:
                raise ConfigError(f"there is no worker {worker}; the job has 0 to {self.workers - 1}")
            if worker in dead:
                raise ConfigError(f"worker {worker} is dead; choose a living one")
        if len(slowdown.workers) == 2 and not self.emulated:
            raise ConfigError("links can only be slowed on the emulated clock; start the job with --resihp-emulate")
        self.holds = self.holds.after(slowdown)

    def notice(self) -> SlownessChanged:
        """What workers and agents are told; agents act on it where workers can't."""
        by_agents = not (self.emulated or self.on_devices)
        links = tuple((one, other, factor) for (one, other), factor in self.holds.links.items())
        return SlownessChanged(by_agents, tuple(self.holds.speeds.items()), links)

    def is_new(self, number: int) -> bool:
        """Whether the scheduled slowdown of this number was not asked for before: all workers ask for each."""
        new = number not in self._scheduled
        self._scheduled.add(number)
        return new
