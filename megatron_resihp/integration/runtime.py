# SPDX-License-Identifier: Apache-2.0
"""What one worker knows about its job, shared by the patches. One per process. May import everything but `cpu`.

The patches write here how far the iteration got; recovery reads it.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_resihp.config import ResihpConfig, Slowdown
from megatron_resihp.control.linux import RunDelay
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.executor.communicators import Communicators
from megatron_resihp.executor.routes import Step
from megatron_resihp.executor.side_group import SideGroup
from megatron_resihp.executor.slice_sums import Bucket
from megatron_resihp.integration.patches.derived_arguments import DerivedArguments
from megatron_resihp.integration.probes.device_slowing import DeviceSlowing
from megatron_resihp.integration.probes.fault_injection import Injections, ScheduledSlowdowns
from megatron_resihp.integration.probes.padding import Padding
from megatron_resihp.integration.probes.probe_clock import make_clock
from megatron_resihp.integration.probes.probe_sheet import Sheet
from megatron_resihp.integration.probes.probes import PadOp, PadTransfer, Probes
from megatron_resihp.integration.progress import Progress
from megatron_resihp.integration.trained import ParameterKinds, Trained
from megatron_resihp.integration.world.heterogeneous import Heterogeneous
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.plan import Coordinate, ParallelPlan, Shard
from megatron_resihp.plan.files import read_plan
from megatron_resihp.protocol.messages import PlanRequest, SlowdownRequest
from megatron_resihp.protocol.notices import PlanChange, ValidationOrder
from megatron_resihp.protocol.records import Outcome

if TYPE_CHECKING:
    from megatron_resihp.integration.loop.preparing import Preparation
    from megatron_resihp.integration.ops.measured_exchange import MeasuredExchange
    from megatron_resihp.integration.state.footprint import Footprint
    from megatron_resihp.integration.step.optimizer_buddies import Kept, Ring
    from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups, Sizes


class Runtime:
    """One worker's state. Created when the arguments are known, filled as Megatron starts. `send` takes the probes'
    notes and must not block.

    Attributes:
        derived: what Megatron derives from the job's arguments for other degrees.
        plan: the plan of the current epoch.
        own_layout: what the job's own arguments say of its layout.
        shares_optimizer: whether the job uses the distributed optimizer where it can.
        tokens: that the losses of this iteration on this worker were summed over, under a heterogeneous plan.
        seen_documents: Σ l and Σ l² of the documents that this worker counts in this iteration, under a heterogeneous
            plan.
        documents: the same of all workers, agreed on in the last step and not told Megatron yet.
        held: the shards whose state `trained` is.
        heterogeneous: the plan as this worker sees it where Megatron's own groups can't run it; None where they can.
        routes, exchange: under a heterogeneous plan this worker's steps, and what carries their results.
        running_chunk: under a heterogeneous plan which of this worker's chunks is being run.
        buckets: under a heterogeneous plan, whose gradients are summed with whom.
        ring, kept: with the distributed optimizer where gradients go for the copies of its parts, and what of its state
            is current here.
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
        lacks_gradients: whether the buffers of `trained` for gradients are freed.
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
        self.heterogeneous: Heterogeneous | None = None
        self.routes: tuple[Step, ...] = ()
        self.exchange: MeasuredExchange | None = None
        self.running_chunk = 0
        self.buckets: list[Bucket] = []
        self.everybody: SideGroup | None = None
        self.buddies: SideGroup | None = None
        self.ring: Ring | None = None
        self.kept: Kept | None = None
        self.shares_optimizer = False
        self.own_layout: OwnLayout | None = None
        self.tokens: Any = 0.0
        self.seen_documents: torch.Tensor | None = None
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
        self.lacks_gradients = False
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
    def coordinate(self) -> Coordinate | None:
        """The coordinate of the job's own layout whose state `trained` is; None if it is of another layout."""
        return None if self.own_layout is None else self.own_layout.coordinate_of(self.held)

    @property
    def writes_shard(self) -> bool:
        """Whether what this worker holds is just what Megatron has in one file of a checkpoint."""
        return self.kept is None and self.coordinate is not None

    @property
    def works(self) -> bool:
        """Whether the plan gives this worker work (False: it is a standby)."""
        return self.plan is None or self.plan.replica_of(self.worker) is not None

    @property
    def replica(self) -> int:
        replica = self.current_plan.replica_of(self.worker)
        assert replica is not None, "a standby has no replica"
        return replica

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Indices of the micro-batches of each global batch that this worker's replica runs."""
        return self.current_plan.replicas[self.replica].micro_batches

    @property
    def read_order(self) -> tuple[int, ...]:
        """Indices of the micro-batches that this worker runs forwards, in order of their first op."""
        if self.heterogeneous is None:
            return self.micro_batches
        return tuple(dict.fromkeys(step.op.micro_batch for step in self.routes if step.op.kind == "F"))

    @property
    def tp_rank(self) -> int | None:
        """This worker's place in its tensor-parallel group; None for a standby."""
        coordinate = self.current_plan.coordinate_of(self.worker) if self.works else None
        return None if coordinate is None else coordinate.tp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this worker works on the embedding."""
        if self.heterogeneous is not None:
            return self.works and 0 in self.heterogeneous.own_chunks
        return self.coordinate is not None and self.coordinate.stage == 0

    @property
    def is_last_stage(self) -> bool:
        if self.heterogeneous is not None:
            return self.heterogeneous.has_head
        return self.coordinate is not None and self.coordinate.stage == self.current_plan.pipeline_parallel - 1

    @property
    def reports(self) -> bool:
        """Whether this worker writes the events of each iteration: replica 0, last stage, TP rank 0."""
        if self.heterogeneous is not None:
            return self.worker == self.heterogeneous.reporter
        first_of_stage = self.coordinate is not None and self.coordinate.tp_rank == 0
        return self.works and self.replica == 0 and self.is_last_stage and first_of_stage

    @property
    def counts_norm(self) -> bool:
        """Whether this worker's gradients enter the norm: exactly one holder of each shard's do, or each its part."""
        return self.works and (self.replica == 0 or self.optimizer_is_shared_out)

    @property
    def optimizer_is_shared_out(self) -> bool:
        """Whether replicas have parts of the optimizer's state only. Under a heterogeneous plan holders have all."""
        return self.shares_optimizer and self.heterogeneous is None

    def reach(self, point: str) -> None:
        self.injections.reach(point, self.progress.iteration)

    def ask_for_plans(self, iteration: int) -> None:
        """Ask for the plans that are due when an iteration begins, once; who reports the iteration asks for all.

        Standbys call it too, or they would ask for plans of long ago when they report some day.
        """
        while self.plans and self.plans[0][0].iteration <= iteration:
            due, plan = self.plans.pop(0)
            if self.reports:
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
