# SPDX-License-Identifier: Apache-2.0
"""What follows from a request to slow a worker or a link down, of a scheduled fault injection or of `resihp inject`.

May import `config`, `protocol`, `events` and pure modules of `control`.
"""

from megatron_resihp.config import ConfigError, Slowdown
from megatron_resihp.control.coordination.actions import Action, Log, Notify
from megatron_resihp.control.coordination.state_machine.changes import reply
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.events.injections import DrillRefused, DrillSet
from megatron_resihp.protocol.answers import Accepted, Answer, Refused
from megatron_resihp.protocol.messages import SlowdownRequest


class Slowdowns:
    """The slowdowns of one job that are injected."""

    def __init__(self, state: State) -> None:
        self._state = state

    def ask_for(self, request: SlowdownRequest) -> list[Action]:
        """Do it, or say why not, and answer the requester."""
        desk, number = self._state.slowness, request.number
        if number is not None and not desk.is_new(number):
            return []
        actions: list[Action] = []
        try:
            slowdown = Slowdown(request.workers, request.factor, request.iteration)
            desk.take(slowdown, self._state.dead, self._state.living)
            answer: Answer = Accepted(str(slowdown))
            actions = [Log(self._injection_set(slowdown)), Notify(desk.notice())]
        except ConfigError as error:
            answer = Refused(str(error))
            if number is not None:
                actions = [Log(DrillRefused(workers=request.workers, reason=str(error)))]
        return [*actions, *reply(request.answer, answer)]

    def _injection_set(self, slowdown: Slowdown) -> DrillSet:
        holds = self._state.slowness.holds
        speeds = {str(worker): speed for worker, speed in holds.speeds.items()}
        links = {f"{one}-{other}": factor for (one, other), factor in holds.links.items()}
        return DrillSet(
            workers=slowdown.workers, factor=slowdown.factor, iteration=slowdown.iteration, speeds=speeds, links=links
        )
