# SPDX-License-Identifier: Apache-2.0
"""Patch: what Megatron does now and then to finish the saves that are under way.

Replaces training.maybe_finalize_async_save. May import megatron and this package.
"""

import functools
import time
from collections.abc import Callable
from typing import Final

from megatron.training import training

from megatron_resihp.integration.runtime import Runtime

LOOK_S: Final = 0.05
"""How often all workers together look whether all have written."""


def wrap_maybe_finalize_async_save(runtime: Runtime, original: Callable[..., None]) -> Callable[..., None]:
    """Finish what all have written. All working workers call it together, and meet while something is under way."""

    @functools.wraps(original)
    def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
        original(blocking=False)
        # Megatron waits for its own writer alone, and does not see that the epoch has broken meanwhile.
        while blocking and runtime.saves.writer.calls:
            time.sleep(LOOK_S)
            runtime.control.heard.check()
            original(blocking=False)
        if blocking:
            original(blocking=True)  # for the processes that remove older checkpoints
        _tell(runtime)
        # train() asks for the writer's end, too, though pretrain() may save once more.
        if terminate and runtime.calls.position > 0:
            runtime.saves.writer.end()

    return maybe_finalize_async_save


def finish_saves() -> None:
    """Wait until what is under way is whole; all working workers call it together."""
    training.maybe_finalize_async_save(blocking=True)


def _tell(runtime: Runtime) -> None:
    for save in runtime.saves.take_whole():
        if runtime.view.reports:
            runtime.control.event(save)
