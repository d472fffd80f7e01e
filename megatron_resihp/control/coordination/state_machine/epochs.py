# SPDX-License-Identifier: Apache-2.0
"""How an epoch begins and breaks, and what comes after it: another plan, or the end.

May import `plan`, `planner`, `protocol` and pure modules of `control`.
"""

from collections.abc import Iterable
from dataclasses import replace

from megatron_resihp.control import exit_codes
from megatron_resihp.control.coordination.actions import Action, AskDown, Log, Notify, Phase
from megatron_resihp.control.coordination.epoch_events import agreed, epoch_started, reconfiguration, recovery
from megatron_resihp.control.coordination.record import NoCommitError, resolve
from megatron_resihp.control.coordination.state_machine.changes import ChangesByChoice
from megatron_resihp.control.coordination.state_machine.ends import Ends
from megatron_resihp.control.coordination.state_machine.links import Separated
from megatron_resihp.control.coordination.state_machine.plans import Plans
from megatron_resihp.control.coordination.state_machine.state import HeldShards, State
from megatron_resihp.control.replanning.change import Change
from megatron_resihp.control.replanning.recovery.inventory import lacking
from megatron_resihp.events.epochs import EpochBroken
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown
from megatron_resihp.events.replanning import ChangeRefused
from megatron_resihp.events.workers import LinkFailed, WorkerDead
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.planner import NoPlanError, initial_plan
from megatron_resihp.protocol.notices import EpochIsBroken, WorkersGivenUp, WorkersTakenIn
from megatron_resihp.protocol.published import EpochPlan, Go
from megatron_resihp.protocol.records import Commit


class Epochs:
    """The epochs of one job."""

    def __init__(self, state: State, plans: Plans, ends: Ends, changes: ChangesByChoice) -> None:
        self._state = state
        self._plans = plans
        self._ends = ends
        self._changes = changes

    def go(self, plan: ParallelPlan, now: float) -> list[Action]:
        """All members are ready: train."""
        state, change = self._state, self._state.changes.under_way
        ready = state.ready.values()
        ports = tuple(sorted({port for each in ready for port in each.ports}))
        state.copies_kept = state.job.copies_experts and all(each.keeps_copies for each in ready)
        actions: list[Action] = [Go(state.epoch, ports), Log(epoch_started(state.epoch, plan, state.copies_kept))]
        if change is not None and state.commit is not None:
            ahead = state.changes.made_ahead is not None
            actions.append(Log(reconfiguration(state.epoch, state.commit, ready, change, ahead, now)))
        elif state.commit is not None:
            dead = state.dead.keys() - state.departures.left
            actions.append(Log(recovery(state.epoch, state.commit, ready, dead, state.broken_at, now)))
        state.phase, state.left_s, state.changes.under_way, state.running = Phase.RUNNING, None, None, plan
        state.reports.accounts.settle()
        return actions + self._changes.after_go()

    # ---- how an epoch ends

    def die(self, causes: dict[int, str], died_at: float, now: float) -> list[Action]:
        """These workers are dead. `causes`: worker → why."""
        state = self._state
        fresh = {w: cause for w, cause in causes.items() if w not in state.dead and w not in state.done}
        members = state.living
        actions = self._note_deaths(fresh, died_at, now)
        state.reports.links.forget(fresh.keys() & members)
        if not fresh.keys() & members:
            return actions
        if state.phase is Phase.STARTING:
            names = ", ".join(f"worker {w} ({cause})" for w, cause in fresh.items())
            before = "before the first iteration" if state.job.shape else "or of a job without --resihp"
            return actions + self._ends.end(exit_codes.RETRY, f"{names} died during start-up, {before}")
        if state.phase is Phase.SAVING:
            return actions + self._ends.saved_by(fresh)
        cause = "; ".join(f"worker {w}: {cause}" for w, cause in fresh.items())
        return actions + self.break_epoch(cause, now) + self.decide(now)

    def give_up(self, workers: Iterable[int], cause: str, now: float, for_good: bool = False) -> list[Action]:
        """These workers count as dead, though their processes may run: their agents end them, and tell of that.

        Args:
            for_good: none are started in their places.
        """
        state, given_up = self._state, tuple(sorted(workers))
        # Who has reported is reached, and so are the agent and all workers of the coordinator's node.
        reached = state.reports.records.keys() if state.phase is Phase.REPORTING else ()
        head, node_of = state.job.size.head, state.joining.node_of
        state.reports.accounts.late.update(w for w in given_up if w not in reached and node_of(w) not in head)
        notice = Notify(WorkersGivenUp(given_up, cause, for_good))
        return [notice, *self.die(dict.fromkeys(given_up, cause), now, now)]

    def _note_deaths(self, causes: dict[int, str], died_at: float, now: float) -> list[Action]:
        state = self._state
        state.lose(causes)
        state.joining.waiting -= causes.keys()
        for worker in causes:
            state.joining.heard_of(worker)
            state.reports.records.pop(worker, None)
        return [
            Log(WorkerDead(
                epoch=state.epoch, dead=worker, node=state.joining.node_of(worker), cause=cause, died_at=died_at,
                noticed_at=now,
            ))
            for worker, cause in causes.items()
        ]  # fmt: skip

    def break_epoch(self, cause: str, now: float, probe: bool = False) -> list[Action]:
        """Have living members stop and report.

        Args:
            probe: survivors first find out which workers they can reach; after a death they report at once.
        """
        state = self._state
        change = state.changes.under_way
        leaving = state.phase is Phase.REPORTING and change is not None
        if state.phase not in (Phase.RUNNING, Phase.BUILDING) and not leaving:
            return []
        if state.phase is Phase.RUNNING or change is not None:
            state.broken_at = now
        if not leaving:  # a worker that has reported by choice doesn't report again
            state.reports.clear()
        state.reports.unreachable = {}
        state.reports.accounts.begin()
        state.changes.under_way = None
        state.phase, state.left_s = Phase.REPORTING, state.limits.report_s
        return self.broken(cause, probe)

    def broken(self, cause: str, probe: bool = False) -> list[Action]:
        """What the log and the workers are told when an epoch has broken."""
        epoch = self._state.epoch
        return [
            Log(EpochBroken(epoch=epoch, broken_epoch=epoch, cause=cause)),
            Notify(EpochIsBroken(epoch, cause, probe)),
        ]

    def leave_by_choice(self, now: float) -> None:
        """The first worker stops for a change; the others will after the same step."""
        state = self._state
        assert state.changes.under_way is not None
        state.changes.under_way = replace(state.changes.under_way, first_reported_at=now)
        state.phase, state.left_s = Phase.REPORTING, state.limits.leave_s
        state.reports.clear()

    # ---- what comes after it

    def decide(self, now: float) -> list[Action]:
        """Publish the next plan, or order an emergency checkpoint, once all living members have reported."""
        state, reports = self._state, self._state.reports
        if state.phase is not Phase.REPORTING:
            return []
        if not state.living:
            return self._ends.none_is_left()
        if not reports.records.keys() >= state.living:
            return []
        if (awaited := self._await_word()) is not None:
            return awaited
        reports.links.note(state.epoch, reports.unreachable)
        separated = reports.links.separated(state.living, self._plans.capacity_without)
        if separated is not None and separated.without and not state.ending.save_reason:
            return self._leave_out(separated, now)
        try:
            times = [reports.times[worker] for worker in reports.records]
            commit = resolve(reports.records.values(), state.commit, state.job.pages.reached, times)
        except NoCommitError as error:
            return self._ends.end(exit_codes.RETRY, str(error))
        step = _note_commit(state, commit) + self._resize(commit)
        if reason := _why_not_go_on(state, separated):
            return step + self._ends.save(reason)
        return self._publish_next(step, now)

    def _resize(self, commit: Commit) -> list[Action]:
        """What follows is planned for the size of the batch after the committed iteration."""
        job, consumed = self._state.job, commit.counters.get("consumed_train_samples")
        if not job.described.batch_steps or not isinstance(consumed, int):
            return []
        if commit.replay:
            consumed += job.samples_after(consumed)
        samples = job.samples_after(consumed)
        if not job.resize(samples):
            return []
        _, shape = self._state.plan_and_shape
        self._state.first = initial_plan(shape, job.size.workers, job.described.pipeline_last)
        return [Log(BatchGrown(global_batch_size=samples, micro_batches=shape.micro_batches))]

    def _leave_out(self, separated: Separated, now: float) -> list[Action]:
        """Go on without one side of a link that fails again and again while both ends live."""
        why, without = f"left out, because {separated.why}", sorted(separated.without)
        self._state.reports.links.left_out.update(without)
        return [
            Log(LinkFailed(reason=separated.why, left_out=tuple(without))),
            *self.give_up(without, why, now, for_good=True),
        ]

    def _await_word(self) -> list[Action] | None:
        """If too few members are accounted for, wait for word of the others, for a while; then the job saves and ends.

        Returns None if there is nothing to wait for.
        """
        state, accounts = self._state, self._state.reports.accounts
        members = state.running.members if state.running is not None else ()
        if state.ending.save_reason or not (short := accounts.short(members)):
            return None
        nodes = accounts.to_ask(members, state.joining.node_of)
        if not accounts.awaits_word(members):
            state.ending.save_reason = short
            return None
        if not accounts.waiting:
            accounts.waiting, state.left_s = True, state.limits.word_s
        return [AskDown(nodes)] if nodes else []

    def _publish_next(self, step: list[Action], now: float) -> list[Action]:
        """Publish the next plan, or save if there is none. `step`: logs the committed one."""
        state, change = self._state, self._state.changes.under_way
        before, shape = state.plan_and_shape
        # Joining workers hold nothing, and need not report.
        joining = state.joining.held(change.plan.members) if change is not None else {}
        held = {worker: state.reports.held[worker] for worker in state.reports.records} | joining
        try:
            plan, held, told = self._plan_after(held, now)
        except NoPlanError as error:
            own = state.job.own
            missing = tuple(shard for lost in error.missing for shard in shape.shards_at(own, lost))
            survivors = self._plans.survivors(held)
            if shape.shares_experts and not survivors.in_parts:  # other holders of the same coordinate may live
                missing = lacking(held, own[-1].end, copied=survivors.copied)
            return step + self._ends.save(str(error), missing)
        same_batches = plan.micro_batch_count == before.micro_batch_count
        chosen = state.changes.under_way if same_batches else None  # there is no way back to smaller ones
        on_trial = state.first_steps.published(plan, before, chosen, told)
        state.epoch += 1
        state.adopt(plan)
        state.phase, state.ready = Phase.BUILDING, {}
        state.left_s = state.limits.build_s
        joined = state.joining.taken_in(plan)
        called = [Notify(WorkersTakenIn(state.epoch, tuple(joined)))] if joined else []
        ahead = state.changes.made_ahead = self._groups_made_for(plan)
        # Workers whose node leaves read that from the very plan that leaves them out.
        leaving = tuple(sorted(state.departures.among(state.reports.records.keys() - held.keys())))
        copied = self._plans.copied_by(held)
        published = EpochPlan(state.epoch, plan, state.commit, held, ahead, leaving, on_trial, copied)
        return [*map(Log, told), *step, published, *called, *self._changes.let_go()]

    def _plan_after(self, held: HeldShards, now: float) -> tuple[ParallelPlan, HeldShards, list[Event]]:
        """The next plan, what its members hold, and what to write to the log.

        Workers whose node is to leave have no part in it, if there is such a plan and the change under way gives them
        none.

        Raises:
            NoPlanError.
        """
        changes = self._state.changes
        change, changes.under_way = changes.under_way, None
        leaving = self._state.departures.among(held) if change is None or change.leaving else frozenset()
        if leaving:
            staying = {worker: shards for worker, shards in held.items() if worker not in leaving}
            try:
                plan, told = self._next_plan(change, staying, now)
                return plan, staying, told
            except NoPlanError:
                pass  # all go on together, and stop in order once they do
        plan, told = self._next_plan(change, held, now)
        return plan, held, told

    def _next_plan(self, change: Change | None, held: HeldShards, now: float) -> tuple[ParallelPlan, list[Event]]:
        """The plan of the change, if all its members are still there, or another; and what to write to the log.

        Raises:
            NoPlanError.
        """
        state = self._state
        before, shape = state.plan_and_shape
        if change is not None and change.plan.micro_batch_count != shape.micro_batches:
            return self._for_larger_batches(change, held, now)
        if change is not None and set(change.plan.members) == held.keys():
            state.changes.under_way = change
            return change.plan, []
        if change is not None:
            state.broken_at = change.first_reported_at or now
            if set(before.members) == held.keys():
                # A worker that was to be taken in has died: all others go on as before.
                return before, []
        return self._plans.plan_for(held)

    def _for_larger_batches(self, change: Change, held: HeldShards, now: float) -> tuple[ParallelPlan, list[Event]]:
        """The same where the next batch is larger than those of the change's plan. Raises NoPlanError."""
        state = self._state
        plan, found = self._plans.plan_for(held)
        told = list(found)
        if not change.larger:
            told.append(ChangeRefused(why=change.why, reason="its plan is for smaller batches than those to come"))
        if held.keys() >= set(state.plan_and_shape[0].members) - change.leaving:
            if not change.larger:  # nobody has made the groups of this plan
                self._changes.begin_larger_batches(state.job.samples_of_plan)
            begun = state.changes.under_way or change
            state.changes.under_way = replace(begun, plan=plan, first_reported_at=change.first_reported_at)
        else:
            state.broken_at = change.first_reported_at or now
        return plan, told

    def _groups_made_for(self, plan: ParallelPlan) -> int | None:
        """The change for which every member of this plan has made its groups already."""
        changes = self._state.changes
        change = changes.under_way
        if change is None or change.plan != plan or not changes.prepared.issuperset(plan.members):
            return None
        return change.number


def _note_commit(state: State, commit: Commit) -> list[Action]:
    same = state.commit is not None and state.commit.iteration == commit.iteration
    state.recoveries_here = (state.recoveries_here if same else 0) + (state.changes.under_way is None)
    state.commit = commit
    return [] if commit.outcome is None else [Log(agreed(state.epoch, commit, commit.outcome))]


def _why_not_go_on(state: State, separated: Separated | None) -> str:
    """Why survivors save what they hold, whatever plan there is; empty: they don't."""
    if state.ending.save_reason:
        return state.ending.save_reason
    if separated is not None:
        return f"{separated.why}, and there is no plan without either"
    if state.recoveries_here > state.limits.recoveries_per_iteration:
        assert state.commit is not None
        return f"{state.recoveries_here - 1} recoveries without a step after iteration {state.commit.iteration}"
    return ""
