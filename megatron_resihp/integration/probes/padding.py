# SPDX-License-Identifier: Apache-2.0
"""Makes ops and transfers last as long as on an emulated device: sleeps for what is left of the time.

Knows nothing of Megatron. May import `control.slowness`, `cost` and `detector`.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from megatron_resihp.control.slowness import Slowness
from megatron_resihp.cost.profile import DeviceProfile, LayerKind, PassCost
from megatron_resihp.detector.input.records import OpKind

SPIN_S: Final = 0.0002
"""The last part of a wait is spun: sleeping wakes up late by about a third of this."""
SLICE_S: Final = 0.05
"""A long wait looks up this often whether it is still wanted."""

BENCHMARK: Final = 0.1
"""A micro-benchmark takes this share of a layer's forward pass."""

StageCosts = Sequence[tuple[PassCost, PassCost, PassCost]]
"""Costs of F, B and W, by chunk; B's include W's where one op computes both."""


class Padding:
    """Pads the ops and transfers of one worker.

    Args:
        profile: of the emulated device.
        worker: this worker's id.
        costs: what this worker holds now.
        tokens_per_token: tokens of the emulated job that one real token stands for.
        bytes_per_token: of a real activation at a stage boundary.
        slowness: what fault injections have slowed.
        interrupted: whether waiting is of no use any more.
        exchanged: seconds of a chunk's op of a kind in which those that share sequences or experts send each other
            tokens, or keys and values, on links as they are now.
        clock, sleep: in seconds; the clock of the records.

    Attributes:
        ops: how many ops were padded.
        late: how many of them had really taken longer than the device would.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        worker: int,
        costs: Callable[[], StageCosts],
        tokens_per_token: float,
        bytes_per_token: float,
        slowness: Callable[[], Slowness],
        interrupted: Callable[[], bool],
        exchanged: Callable[[OpKind, int], float] = lambda kind, chunk: 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ops = 0
        self.late = 0
        self._profile = profile
        self._worker = worker
        self._costs = costs
        self._scale = tokens_per_token
        self._bytes_per_token = bytes_per_token
        self._slowness = slowness
        self._interrupted = interrupted
        self._exchanged = exchanged
        self._clock = clock
        self._sleep = sleep
        self._random = random.Random(f"{profile.seed} {worker}")

    def pad_op(self, kind: OpKind, chunk: int, tokens: float, squares: float, started: float, waited: float) -> float:
        """Wait until the op has lasted as long as on the device, and as long as it has waited for others on top.

        Returns the seconds by which it has lasted longer than that, because the host was busy.

        Args:
            kind: which of the chunk's costs it has.
            tokens, squares: N and Σ l² of the real micro-batch.
            started: when the op began.
            waited: seconds of it in tensor-parallel collectives; NaN if not known.
        """
        cost = self._costs()[chunk][kind]
        seconds = cost.seconds(tokens * self._scale, squares * self._scale**2)
        seconds *= max(self._random.gauss(1.0, self._profile.noise), 0.0) / self._slowness().speed(self._worker)
        seconds += self._exchanged(kind, chunk)
        deadline = started + seconds + (0.0 if math.isnan(waited) else waited)
        self.ops += 1
        self.late += self._clock() > deadline
        return self._wait_until(deadline)

    def pad_benchmark(self) -> None:
        """Wait as long as a micro-benchmark takes, which is the same whatever the worker holds."""
        forward, _, _ = self._profile.stage([LayerKind.TRANSFORMER], 1)
        tokens = float(self._profile.sequence)
        seconds = BENCHMARK * forward.seconds(tokens, tokens**2) / self._slowness().speed(self._worker)
        self._wait_until(self._clock() + seconds)

    def pad_transfer(self, peer: int, came: float, size: float) -> float:
        """Wait as long as `size` bytes from `peer`, which gloo has handed over, would take on the device's links.

        Returns the seconds by which that has lasted longer, because the host was busy.

        Args:
            peer: the sender.
            came: when they were handed over: as soon as both ends were there.
            size: in bytes.
        """
        return self._wait_until(came + self.transfer_seconds(peer, size))

    def pad_arrival(self, arrival: float) -> None:
        """Wait until what has come already would have come on the device."""
        self._wait_until(arrival)

    def transfer_seconds(self, peer: int, size: float) -> float:
        """What `size` bytes from `peer` take on the device's links as they are now."""
        tokens = self._scale * size / self._bytes_per_token
        seconds = self._profile.transfer_seconds((self._worker, peer), tokens)
        return seconds / self._slowness().link(self._worker, peer)

    def _wait_until(self, deadline: float) -> float:
        while (left := deadline - self._clock()) > SPIN_S:
            if self._interrupted():
                return 0.0
            self._sleep(min(left - SPIN_S, SLICE_S))
        while (now := self._clock()) < deadline:
            pass
        return now - deadline
