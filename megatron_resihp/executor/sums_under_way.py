# SPDX-License-Identifier: Apache-2.0
"""Sums gradients while the backward pass goes on, on a thread of its own. May import torch, `plan` and this package.

The thread takes the buckets one by one in their order, which is the same on every worker, and each as soon as this
worker's gradients of it are final. Ops never wait for a sum. So all gradients become final, whatever is summed when.
Then no workers wait for each other in a circle: those that have the first bucket that is not summed yet can sum it.
"""

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron_resihp.executor.slice_sums import Bucket, Views, sum_gradients
from megatron_resihp.plan.slices import Slice


class Moment(Protocol):
    """In the device's work, as torch.cuda.Event."""

    def wait(self) -> None:
        """Let the later work of this thread's stream wait for it."""
        ...


class SumsUnderWay:
    """The sums of one iteration.

    Attributes:
        norms: of each gradient on this worker as it was before its sum; all there after `finish`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], views: Views, contributed: Set[Slice], noting_norms: bool,
        on_device: Callable[[], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        """Arguments as of `sum_gradients`, and

        Args:
            noting_norms: whether norms are asked for.
            on_device: gives the thread its device, and a stream of its own.
        """
        self._buckets, self._views, self._contributed = buckets, views, contributed
        self._noting_norms, self._on_device = noting_norms, on_device
        self._final: SimpleQueue[tuple[int, Iterable[Moment]] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self.norms: list[torch.Tensor] = []
        self._thread = threading.Thread(target=self._serve, name="resihp-sums", daemon=True)
        self._left = len(buckets)

    def begin(self) -> None:
        """Wait for gradients from now on."""
        self._thread.start()

    def final(self, number: int, moments: Iterable[Moment]) -> None:
        """This worker's gradients of bucket `number` are final once these moments have passed. Called from any thread,
        in any order, once for each bucket."""
        self._final.put((number, moments))

    def finish(self) -> None:
        """Wait until all is summed. The sums are there once the thread's stream has done its work.

        Raises:
            every error of the sums.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._left:
            raise RuntimeError(f"{self._left} of {len(self._buckets)} buckets of gradients are not summed")

    def give_up(self) -> None:
        """Begin no more sums for which gradients are missing. A sum under way goes on until it is interrupted."""
        self._final.put(None)

    def join(self) -> None:
        """Wait until the thread uses no gradients any more, and let go of all that it used; its waits are
        interrupted."""
        self.give_up()
        self._thread.join()
        error, self._error = self._error, None
        while error is not None:
            # Its frames hold groups, which have to be freed in a thread that may wait for that (`groups.retired`).
            traceback.clear_frames(error.__traceback__)
            error = error.__context__

    def _serve(self) -> None:
        try:
            with self._on_device(), torch.no_grad():
                self._sum()
        except BaseException as error:
            self._error = error

    def _sum(self) -> None:
        waiting: dict[int, Iterable[Moment]] = {}
        for number, bucket in enumerate(self._buckets):
            while number not in waiting:
                told = self._final.get()
                if told is None:
                    return
                waiting[told[0]] = told[1]
            for moment in waiting.pop(number):
                moment.wait()
            if self._noting_norms:
                views = [view for piece in bucket.slices for _, view in self._views[piece]]
                self.norms += torch._foreach_norm(views) if views else []
            sum_gradients([bucket], self._views, self._contributed)
            self._left -= 1
