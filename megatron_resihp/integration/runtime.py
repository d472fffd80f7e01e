# SPDX-License-Identifier: Apache-2.0
"""What one worker knows about its job, shared by the patches. One per process. May import everything but `cpu`.

The patches write here how far the iteration got; recovery reads it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_resihp.config import ResihpConfig, Slowdown
from megatron_resihp.control.linux import RunDelay
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.executor.communicators import Communicators
from megatron_resihp.integration.loop.preparing import Preparation
from megatron_resihp.integration.modes.mode import Mode
from megatron_resihp.integration.patches.derived_arguments import DerivedArguments
from megatron_resihp.integration.probes.device_slowing import DeviceSlowing
from megatron_resihp.integration.probes.fault_injection import Injections, ScheduledSlowdowns
from megatron_resihp.integration.probes.padding import Padding
from megatron_resihp.integration.probes.probe_clock import make_clock
from megatron_resihp.integration.probes.probe_sheet import Sheet
from megatron_resihp.integration.probes.probes import PadOp, PadTransfer, Probes
from megatron_resihp.integration.progress import Progress
from megatron_resihp.integration.state.footprint import Footprint
from megatron_resihp.integration.step.optimizer_copy import Kept
from megatron_resihp.integration.trained import ParameterKinds, Trained
from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups, Sizes
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.integration.world.view import View
from megatron_resihp.plan import Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.files import read_plan
from megatron_resihp.protocol.messages import PlanRequest, SlowdownRequest
from megatron_resihp.protocol.notices import PlanChange, ValidationOrder
from megatron_resihp.protocol.records import Outcome


class Runtime:
    """One worker's state. Created when the arguments are known, filled as Megatron starts. `send` takes the probes'
    notes and must not block.

    Attributes:
        derived: what Megatron derives from the job's arguments for other degrees.
        plan: the plan of the current epoch.
        own_layout: what the job's own arguments say of its layout.
        shares_optimizer: whether the job uses the distributed optimizer where it can.
        documents: Σ l and Σ l² of the documents of all workers, agreed on in the last step and not told Megatron yet.
        held: the shards whose state `trained` is.
        mode: how the plan in force is run; after an epoch's end, how it was run, without groups.
        kept: with the distributed optimizer, what of its state is current here.
        trained: the live training objects; pretrain's own references stay valid, recovery fills them anew.
        parameter_kinds: of the whole model, once the job's first workers have told each other.
        totals: Megatron's running loss totals as of the last log call.
        flops: floating-point operations so far, as train() counts them.
        losses: what the schedule returned in this iteration (only the last stage has any).
        replay: the outcome of a step that is applied already; train_step returns it instead of computing.
        run: what tells this run from others in the same run directory.
        joining: whether this worker was started anew and no plan has been run with it yet.
        on_trial: whether no step has been agreed on under a plan that was chosen (`control.coordination.first_step`).
        in_loop: whether this worker runs Megatron's train() (False: a standby, or not there yet).
        calls: the calls that pretrain() has made of all workers together: train(), then final saves and evaluations.
        position: number of the call that this worker is in or comes to next.
        checkpointing_context: pretrain's own.
        phases: seconds of each phase of the last recovery, until they are in the event log.
        footprint: what its rebuild took of the device, until that is there too; None: nothing was built.
        recovered_from: when the death was noticed that the current epoch recovered from, until its first step.
        fed: sample indices that this worker's loader handed to the model in this iteration.
        probes: what measures this worker's iterations.
        to_validate: micro-benchmarks that all workers begin after this step.
        plans: that are still to be asked for, each with its JSON: its file may be gone by then.
        to_change: whether all workers leave for another plan after this step.
        saves: number of the last order to write a checkpoint that was agreed on.
        preparation: what makes groups for the next plan while this one is run.
        padding: what makes ops and transfers last as long as on an emulated device; None: nothing does.
        slowing: what slows this worker's device in fault injections; None: it has none, its agent stops the process.
    """

    def __init__(
        self,
        config: ResihpConfig,
        control: WorkerControl,
        communicators: Communicators,
        args: Any,
        derived: DerivedArguments,
        send: Callable[[Sheet], None],
    ) -> None:
        self.config = config
        self.control = control
        self.communicators = communicators
        self.args = args
        self.derived = derived
        self.worker = control.worker
        self.plan: ParallelPlan | None = None
        self.held: tuple[Shard, ...] = ()
        self.trained: Trained | None = None
        self.progress = Progress()
        self.mode_in_force: Mode | None = None
        self.kept: Kept | None = None
        self.shares_optimizer = False
        self.own_layout: OwnLayout | None = None
        self.documents = (0.0, 0.0)
        self.megatron_groups: MegatronGroups | None = None
        self.sizes: Sizes | None = None
        self.build_groups: functools.partial[None] | None = None
        self.build_trained: Callable[[], Trained] | None = None
        self.parameter_kinds: ParameterKinds | None = None
        self.feeds: list[Any] = []
        self.totals: dict[str, Any] = {}
        self.carried_totals: dict[str, Any] | None = None
        self.flops: float = 0.0
        self.losses: list[dict[str, torch.Tensor]] = []
        self.loss_names: tuple[str, ...] = ()
        self.fed: list[int] = []
        self.replay: Outcome | None = None
        self.run = ""
        self.joining = False
        self.on_trial = False
        self.in_loop = False
        self.calls: list[Callable[[], Any]] = []
        self.position = 0
        self.checkpointing_context: dict[str, Any] = {}
        self.phases: dict[str, float] = {}
        self.footprint: Footprint | None = None
        self.recovered_from: float | None = None
        self.last_step_at: float | None = None
        self.probes = Probes(self.worker, make_clock, send, RunDelay())
        self.padding: Padding | None = None
        self.slowing: DeviceSlowing | None = None
        self.to_validate: ValidationOrder | None = None
        self.to_change = False
        self.saves = 0
        self.preparation: Preparation | None = None
        self.injections = Injections(config.injections(), self.worker, self._announce_injection)
        self.plans = [(plan, read_plan(plan.path)) for plan in config.plans()]
        self.slowdowns = ScheduledSlowdowns(config.slowdowns(), self._ask_for_slowdown)

    @property
    def pad_op(self) -> PadOp | None:
        if self.padding is not None:
            return self.padding.pad_op
        slowing = self.slowing
        return slowing.pad_op if slowing is not None and slowing.speed < 1.0 else None

    @property
    def pad_transfer(self) -> PadTransfer | None:
        return None if self.padding is None else self.padding.pad_transfer

    @property
    def epoch(self) -> int:
        return self.control.epoch

    @property
    def change(self) -> PlanChange | None:
        """The change of plan that this worker can leave the epoch for, as far as it has heard."""
        # In this order: what is heard of between both has its thread already.
        change = self.control.change
        return change if self.preparation is None or self.preparation.is_over() else None

    @property
    def current_plan(self) -> ParallelPlan:
        assert self.plan is not None, "no plan yet"
        return self.plan

    @property
    def own(self) -> OwnLayout:
        assert self.own_layout is not None, "no arguments yet"
        return self.own_layout

    @property
    def mode(self) -> Mode:
        assert self.mode_in_force is not None, "no plan has been run yet"
        return self.mode_in_force

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self.mode_in_force = mode

    @property
    def view(self) -> View:
        """What this worker is under the plan in force."""
        return self.mode.view

    @property
    def live(self) -> Trained:
        """The training objects, once Megatron has built them."""
        assert self.trained is not None, "no model yet"
        return self.trained

    @property
    def megatron_builder(self) -> functools.partial[None]:
        """What makes Megatron's groups."""
        assert self.build_groups is not None, "no groups yet"
        return self.build_groups

    @property
    def job_sizes(self) -> Sizes:
        """The job's own sizes, where Megatron looks them up."""
        assert self.sizes is not None, "no model yet"
        return self.sizes

    @property
    def job_groups(self) -> MegatronGroups:
        """Megatron's table of groups."""
        assert self.megatron_groups is not None, "no groups yet"
        return self.megatron_groups

    @property
    def coordinate(self) -> Coordinate | None:
        """The coordinate of the job's own layout whose state `trained` is; None if it is of another layout."""
        return None if self.own_layout is None else self.own_layout.coordinate_of(self.held)

    @property
    def writes_shard(self) -> bool:
        """Whether what this worker holds is just what Megatron has in one file of a checkpoint."""
        return self.kept is None and self.coordinate is not None

    def reach(self, point: str) -> None:
        self.injections.reach(point, self.progress.iteration)

    def ask_for_plans(self, iteration: int) -> None:
        """Ask for the plans that are due when an iteration begins, once; who reports the iteration asks for all.

        Standbys call it too, or they would ask for plans of long ago when they report some day.
        """
        while self.plans and self.plans[0][0].iteration <= iteration:
            due, plan = self.plans.pop(0)
            if self.view.reports:
                self.control.tell(PlanRequest(plan, f"--resihp-plan {due.path}", patient=True))

    def _announce_injection(self, injection: Any) -> None:
        self.control.event(
            "drill",
            action=injection.action,
            target=injection.worker,
            iteration=self.progress.iteration,
            point=injection.point,
        )

    def _ask_for_slowdown(self, index: int, slowdown: Slowdown) -> None:
        self.control.tell(SlowdownRequest(slowdown.workers, slowdown.factor, slowdown.iteration, index))
