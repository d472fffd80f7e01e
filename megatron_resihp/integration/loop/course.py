# SPDX-License-Identifier: Apache-2.0
"""The calls that pretrain() makes of all workers together: train(), then the final save and the evaluations.

pretrain() itself cannot be entered again. So when an epoch breaks after train(), a worker that is further than others
makes the calls in between once more, and one that is behind just goes on: all meet in the earliest call that any of
them is in. May import megatron and this package's other modules.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.training import get_timers

from megatron_resihp.control.worker.errors import CoordinatorLost, JobEnded
from megatron_resihp.integration.loop.last_save import save_without_coordinator
from megatron_resihp.integration.loop.recovery import recover
from megatron_resihp.integration.loop.standby import keep_current
from megatron_resihp.integration.loop.telemetry import report_recovered
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.protocol.logs import Place


def follow(runtime: Runtime) -> Any:
    """Make the last of `runtime.calls.made`, and after each recovery those that some worker has still to make.

    Returns:
        What the last call returned; None if all others have made it already.
    """
    try:
        # A device may hold this thread up anywhere, in a copy of state too; what it waits for there may be lost.
        with runtime.communicators.waiter.noted():
            return _follow(runtime, len(runtime.calls.made) - 1)
    except JobEnded as end:
        if isinstance(end, CoordinatorLost):
            save_without_coordinator(runtime, str(end))
        _leave(runtime, end)


def _follow(runtime: Runtime, number: int) -> Any:
    while True:
        try:
            return _make_calls(runtime, number)
        except Exception as error:
            recover(runtime, error)
        # Save strategies remember groups of the old epoch.
        runtime.calls.checkpointing_context.pop("save_strategy", None)
        runtime.calls.checkpointing_context.pop("load_strategy", None)
        number = runtime.calls.position
        if number > 0 and runtime.view.works:
            # train() leaves this timer running and the final save stops it; recovery has made new timers.
            get_timers()("interval-time", log_level=0).start()


def _make_calls(runtime: Runtime, first: int) -> Any:
    if not runtime.view.works:
        keep_current(runtime)
    returned = None
    for number in range(first, len(runtime.calls.made)):
        runtime.calls.position = number
        returned = runtime.calls.made[number]()
        if number > 0:
            runtime.log.send_page(Place(number, runtime.progress.iteration))
            report_recovered(runtime)
    runtime.calls.position = max(runtime.calls.position, len(runtime.calls.made))
    return returned


def _leave(runtime: Runtime, end: JobEnded) -> NoReturn:
    print(f"resihp: worker {runtime.worker} ends: {end}", file=sys.stderr, flush=True)
    runtime.saves.writer.end()
    sys.exit(end.code)


def wrap_final(runtime: Runtime, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that all workers call together, recovered into when pretrain() calls it after train()."""

    @functools.wraps(original)
    def final(*positional: Any, **options: Any) -> Any:
        if runtime.calls.position == 0:  # before train() or in it
            return original(*positional, **options)
        runtime.calls.made.append(functools.partial(original, *positional, **options))
        made_by_all = len(runtime.calls.made) - 1 < runtime.calls.position
        return None if made_by_all else follow(runtime)

    return final
