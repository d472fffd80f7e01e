# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py whose last backward op of each chunk ends only when a sum of gradients is over, which has
begun in the same backward pass. A worker that waits in vain ends.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402

from megatron_resihp.executor import sums_under_way  # noqa: E402
from megatron_resihp.integration.ops.final_gradients import FinalGradients  # noqa: E402
from megatron_resihp.plan import PlannedOp  # noqa: E402

PATIENCE_S = 20.0

plain_sum, plain_watching = sums_under_way.sum_gradients, FinalGradients.watching
summed = threading.Event()


def sum_gradients(buckets: Any, views: Any, contributed: Any) -> None:
    plain_sum(buckets, views, contributed)
    [bucket] = buckets
    if bucket.group is not None and any(views[piece] for piece in bucket.slices):
        summed.set()


@contextmanager
def watching(self: FinalGradients, op: PlannedOp) -> Iterator[None]:
    with plain_watching(self, op):
        yield
        if self._last[op.chunk] == op:
            assert summed.wait(PATIENCE_S), f"no sum was over before {op} was"
            print(f"{op} has ended after a sum", flush=True)


def fresh(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *positional: Any, **options: Any) -> None:
        summed.clear()
        plain(self, *positional, **options)

    return init


if __name__ == "__main__":
    sums_under_way.sum_gradients = sum_gradients  # type: ignore[assignment]
    FinalGradients.watching = watching  # type: ignore[method-assign]
    FinalGradients.__init__ = fresh(FinalGradients.__init__)  # type: ignore[method-assign]
    pretrain_gpt.main()
