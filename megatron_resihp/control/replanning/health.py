# SPDX-License-Identifier: Apache-2.0
"""How fast workers and links are, as far as the detector has said. Pure; imports `events`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatron_resihp.events.detection import Verdict

Link = tuple[int, int]


def still_slow(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The last verdict of each worker and link, but for those that are healthy again. `verdicts`: in their order."""
    last = {tuple(sorted(each.workers)): each for each in verdicts}
    return [each for each in last.values() if each.change != "recovery"]


class Speeds:
    """Kept up to date verdict by verdict; a worker or link that nothing was said of is healthy."""

    def __init__(self) -> None:
        self._workers: dict[int, float] = {}
        self._links: dict[Link, float] = {}

    def note(self, verdict: Verdict) -> None:
        """Take in what the detector has found."""
        workers, speed = verdict.workers, 1.0 if verdict.change == "recovery" else verdict.speed
        if len(workers) == 1:
            self._workers = _with(self._workers, workers[0], speed)
        else:
            self._links = _with(self._links, (min(workers), max(workers)), speed)

    def of(self, workers: Collection[int]) -> dict[int, float]:
        """The speed of each worker."""
        return {worker: self._workers.get(worker, 1.0) for worker in workers}

    def links(self, workers: Collection[int]) -> dict[Link, float]:
        """The slow links between these workers."""
        return {pair: speed for pair, speed in self._links.items() if set(pair) <= set(workers)}

    def slow(self, workers: Collection[int]) -> dict[tuple[int, ...], float]:
        """The slow ones of these workers, and the slow links between them, by their one or two ids."""
        links: Mapping[Any, float] = self.links(workers)
        return {**{(worker,): speed for worker, speed in self.of(workers).items() if speed < 1.0}, **links}

    def in_words(self, workers: Collection[int]) -> str:
        """Which of these workers are slow, and which links between them."""
        slow = [f"worker {worker} at {speed:.2f}" for worker, speed in sorted(self.of(workers).items()) if speed < 1.0]
        links = [f"link {one}-{other} at {speed:.2f}" for (one, other), speed in sorted(self.links(workers).items())]
        return ", ".join([*slow, *links]) or "all workers are healthy"


def _with(known: Mapping[Any, float], key: Any, speed: float) -> dict[Any, float]:
    """A new mapping, so that another thread may read the old one meanwhile."""
    rest = {each: value for each, value in known.items() if each != key}
    return rest if speed >= 1.0 else {**rest, key: speed}
