# SPDX-License-Identifier: Apache-2.0
"""How the job ends: in order after an iteration, at once, or once survivors have saved what they hold.

May import `plan` and pure modules of `control`.
"""

from collections.abc import Iterable

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, End, Log, Notify, Phase
from megatron_resihp.control.coordination.state_machine.plans import Plans
from megatron_resihp.control.coordination.state_machine.state import State
from megatron_resihp.control.replanning.recovery.inventory import each_writes_all
from megatron_resihp.events.job import RunFinished
from megatron_resihp.plan import Shard
from megatron_resihp.protocol.notices import JobEnds, StopTraining
from megatron_resihp.protocol.published import EmergencyCheckpointOrder


class Ends:
    """The ends of one job."""

    def __init__(self, state: State, plans: Plans) -> None:
        self._state = state
        self._plans = plans

    def end(self, code: int, reason: str) -> list[Action]:
        """End the job now."""
        self._state.phase = Phase.ENDED
        return [
            Notify(JobEnds(code, reason)),
            Log(RunFinished(exit_code=code, reason=reason)),
            # Workers that have told nothing of a job hear no notice either.
            End(code, reason, at_once=self._state.job.shape is None and code != exit_codes.FINISHED),
        ]

    def stop(self, number: int, reason: str) -> list[Action]:
        """Let all workers end in order after an iteration. `number`: of the signal."""
        ending = self._state.ending
        ending.stop_signal, ending.stop_reason = number, reason
        if self._state.phase is Phase.STARTING:
            return self.end(exit_codes.stopped_by(number), f"{reason} during start-up")
        return [Notify(StopTraining(number))]

    def save(self, reason: str, missing: tuple[Shard, ...] = ()) -> list[Action]:
        """Have survivors write an emergency checkpoint; the job ends when they have.

        Args:
            missing: shards that no survivor holds.
        """
        state, ending = self._state, self._state.ending
        held = {worker: state.reports.held[worker] for worker in sorted(state.living) if state.reports.held.get(worker)}
        writers = self._plans.optimizer.writers(held)
        state.epoch += 1
        state.phase, state.left_s = Phase.SAVING, state.limits.save_s
        ending.saving = set(writers)
        ending.saved_reason = ending.save_reason or f"no plan fits the survivors: {reason}"
        entire = each_writes_all(writers, held)
        order = EmergencyCheckpointOrder(state.epoch, reason, state.commit, writers, missing, entire)
        return [order] if writers else [order, *self.end_saved()]

    def saved_by(self, workers: Iterable[int]) -> list[Action]:
        """These workers have written their parts of the emergency checkpoint, or have died."""
        self._state.ending.saving.difference_update(workers)
        if self._state.phase is Phase.SAVING and not self._state.ending.saving:
            return self.end_saved()
        return []

    def end_saved(self) -> list[Action]:
        """End the job, with as much saved as was saved in time."""
        ending = self._state.ending
        return self.end(exit_codes.RETRY if ending.save_reason else exit_codes.NO_PLAN, ending.saved_reason)

    def too_early(self) -> str:
        """In words, how far the job has come, if it may not end in order yet; empty: it may, or nothing is known."""
        job = self._state.job.description
        may_be = job is None or job.ends_early or self._state.ending.stop_signal
        return "" if may_be else self._before_the_end()

    def _before_the_end(self) -> str:
        """In words, how far the job has come; empty: to its end, or nothing is known."""
        state, job = self._state, self._state.job.description
        reached = max(state.job.reached, 0 if state.commit is None else state.commit.iteration)
        if job is None or job.train_iters is None or reached >= job.train_iters:
            return ""
        return f"after iteration {reached} of {job.train_iters}"

    def all_have_ended(self) -> list[Action]:
        """End a job whose workers' scripts have come to their end, or have died."""
        state = self._state
        if state.phase is Phase.STARTING and state.job.shape is not None:
            return self.end(exit_codes.FAILED, "the workers ended before the first iteration; see their logs")
        if too_early := self.too_early():
            return self.end(exit_codes.FAILED, f"the workers ended {too_early}; see their logs")
        if state.ending.stop_signal:
            return self.end(exit_codes.stopped_by(state.ending.stop_signal), state.ending.stop_reason)
        how_far = self._before_the_end()
        return self.end(exit_codes.FINISHED, f"{exit_codes.STOPPED_BY_FLAGS} {how_far}" if how_far else "finished")

    def none_is_left(self) -> list[Action]:
        """End a job without living workers: the last one has died, perhaps after others had brought it to its end."""
        state = self._state
        if state.done and state.job.trained and not self.too_early():
            return self.all_have_ended()
        return self.end(exit_codes.RETRY, "no worker survived")

    def end_if_stranded(self) -> list[Action]:
        """End a job whose workers wait at the start for others that have finished and never come."""
        state = self._state
        if state.phase is not Phase.STARTING or not state.ready or not state.ready.keys() >= state.living:
            return []
        gone = ", ".join(f"worker {w}" for w in sorted(state.done - set(state.ready)))
        return self.end(exit_codes.FAILED, f"{gone} finished during start-up, and the others wait for them")
