# SPDX-License-Identifier: Apache-2.0
"""Heterogeneous plans: Megatron knows one stage only; ops, sums of gradients and state go by chunks and slices.

May import megatron, `executor` and this package.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch.distributed.constants import default_pg_timeout

from megatron_resihp.config import DEVICE
from megatron_resihp.executor.direct.order import SliceSum, slice_sums
from megatron_resihp.executor.direct.sums import sum_between_devices
from megatron_resihp.executor.gloo.groups_ahead import WorldGroup
from megatron_resihp.executor.groups.side_group import MakeSideGroup
from megatron_resihp.executor.routes import Step
from megatron_resihp.executor.slice_sums import Bucket, Views, make_buckets, sum_gradients
from megatron_resihp.integration.modes.direct_way import WatchedPeers, agreed_to_use, can_carry
from megatron_resihp.integration.modes.early_sums import EarlySums, own_norms
from megatron_resihp.integration.modes.emergency_format import whole_metadata
from megatron_resihp.integration.modes.migration import migrate_slices
from megatron_resihp.integration.modes.mode import (
    Counts,
    DocumentCounts,
    Losses,
    Migrated,
    Mode,
    ModeState,
    ParametersNorm,
    Schedule,
)
from megatron_resihp.integration.modes.overlaps import UNLIKE_REPLICAS, flag_of
from megatron_resihp.integration.modes.shared_evaluations import SharedEvaluations
from megatron_resihp.integration.modes.uniform import averaging_of
from megatron_resihp.integration.ops.final_gradients import FinalGradients
from megatron_resihp.integration.ops.first_micro_batch import treat_all_alike
from megatron_resihp.integration.ops.measured_exchange import MeasuredExchange
from megatron_resihp.integration.ops.program_schedule import (
    MegatronWork,
    ScheduleCall,
    boundary_of,
    check_gradients,
    check_norms,
    evaluation_routes,
    is_checked,
    make_exchange,
    run_evaluation,
    run_training,
    training_routes,
)
from megatron_resihp.integration.patches import documents
from megatron_resihp.integration.patches.checkpoints import args_with, distributed_format, state_in_parts
from megatron_resihp.integration.progress import NO_DOCUMENTS
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.reshardable import has_stepped
from megatron_resihp.integration.state.slice_state import (
    Holding,
    counted_gradients,
    counted_norm_squared,
    counted_parameters_squared,
    divide_by_tokens,
    sum_inside_stage,
    summed_views,
    zeros_in,
)
from megatron_resihp.integration.step.loss_scale import scaled_losses
from megatron_resihp.integration.step.optimizer_whole import are_there_parts, put_together
from megatron_resihp.integration.step.step import agreed_losses
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.group_needs import GLOO, timeout_of, world_group
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.integration.world.heterogeneous_groups import StageGroup, as_stage, ranks_of_stage
from megatron_resihp.integration.world.streams import start_streams
from megatron_resihp.plan import Shard
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import Outcome


class HeterogeneousMode(Mode):
    """A plan that Megatron's own groups can't run: `ops.program_schedule` runs its ops, `executor` carries results."""

    view: HeterogeneousView
    _exchange: MeasuredExchange
    _routes: tuple[Step, ...]

    def __init__(self, runtime: Runtime, view: HeterogeneousView, make_group: MakeSideGroup) -> None:
        self.view = view
        self.state = HeterogeneousState(runtime, view)
        self.counts = HeterogeneousCounts(runtime, view)
        self.everybody = make_group("everybody", view.plan.members)
        self.averaging = averaging_of(runtime, 1)  # sums by slices are not divided
        self._buckets = make_buckets(view.shares.holders, view.worker, make_group)
        self._evaluations = SharedEvaluations(runtime.job.args, view, make_group)
        self._runtime = runtime
        self._direct: WatchedPeers | None = None
        self._early: EarlySums | None = None
        self._rounds = 0
        self._tokens: Any = 0.0

    def close(self) -> None:
        super().close()
        if self._early is not None:
            self._early.join()
            self._early = None
        self._buckets, self._direct = [], None
        vars(self).pop("_exchange", None)

    def meet(self) -> None:
        runtime, members = self._runtime, self.view.plan.members
        if runtime.job.config.resihp_carrier != DEVICE:
            return
        usable = can_carry(runtime.job.args.distributed_backend) and runtime.recovery.direct_way.is_usable(members)
        if not agreed_to_use(usable, self.everybody):
            if self.view.works and self.view.reports:
                print("resihp: gradients and results go through the host: they can't cross between devices", flush=True)
            return
        peers = runtime.communicators.peer_group(members, timeout_of(runtime.job.args))
        self._direct = WatchedPeers(peers, self.nccl_failed)
        self._direct.connect()

    def begin_iteration(self) -> None:
        """Others may have evaluated or saved meanwhile, which waits between devices must not include."""
        if self._direct is not None:
            self.everybody.sum(torch.zeros(1))

    def nccl_failed(self) -> None:
        """Whatever group it is: one of the direct way may have held it up."""
        if (
            self._direct is not None and not self._runtime.control.heard.broken()
        ):  # the abort of a broken epoch fails everything
            self._runtime.recovery.direct_way.strike(self.view.plan.members)

    def wanted_groups(self) -> list[WorldGroup]:
        args, (own, peers) = self._runtime.job.args, ranks_of_stage(self.view)
        world = world_group(args, len(self.view.rank_order))
        stage = WorldGroup(tuple(sorted(peers)), default_pg_timeout)
        alone = WorldGroup((own,), default_pg_timeout)
        if args.distributed_backend == GLOO:
            return [world, alone, stage]
        # Groups beside NCCL's, for host tensors.
        singletons = [alone] if self._runtime.setup.groups.on_host(args.distributed_backend) else []
        return [*singletons, world._replace(timeout=default_pg_timeout), stage]

    def build_groups(self) -> None:
        runtime, view = self._runtime, self.view
        runtime.setup.sizes.replace(view)
        if view.reports:
            _tell_of_lost_overlap(runtime.setup.sizes.own(runtime.job.args), self._sums_early)
        runtime.setup.groups.replace(view, runtime.job.args.distributed_backend)
        rows, _ = boundary_of(runtime.job.args, runtime.job.args.micro_batch_size)
        direct = self._direct is not None
        self._routes = training_routes(view, runtime.job.own.sequence_parallel, rows, direct)
        self.splits_backward = any(step.op.kind == "W" for step in self._routes)
        self._exchange, stamps = make_exchange(runtime.job.args, runtime.communicators, view, self._direct)
        at_transfer = partial(runtime.reach, "p2p")
        self._exchange.begin(runtime.probes, runtime.pads.padding, view.own_chunks, at_transfer, stamps)
        self._exchange.connect(self._routes)
        with as_stage(view.own_chunks[0], len(view.chunks)):
            start_streams(runtime.job.args, runtime.epoch)

    def train(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        asked = _schedule_call(call)
        with scaled_losses(self.averaging, self._runtime.held.live.optimizer, asked.model, asked.count):
            work = self._run(asked)
        counts = self.view.tp_rank == 0  # its peers have seen the same
        self._tokens = work.tokens if counts else 0.0
        self.seen_documents = work.documents if counts else None
        return work.reported

    def _run(self, asked: ScheduleCall) -> MegatronWork:
        """All ops of an iteration; what may be summed early is summed meanwhile, once in an iteration.

        Megatron may run an iteration again to explain a result. Then nothing is summed early, as standbys, which know
        nothing of that, take part in sums.
        """
        if not self._sums_early:
            work = self._run_ops(asked)
            check_gradients(asked.model)
            return work
        self._rounds += 1
        checked = is_checked(asked.model)
        if self._rounds > 1:
            work = self._run_ops(asked)
            norms = own_norms(self.view, asked.model) if checked else []
        else:
            work, norms = self._run_summing(asked, checked)
        if checked:
            check_norms(asked.model, norms)
        return work

    def _run_summing(self, asked: ScheduleCall, checked: bool) -> tuple[MegatronWork, list[torch.Tensor]]:
        early = self._early = EarlySums(self.view, self._routes, self._buckets_of(False), asked.model, checked)
        try:
            work = self._run_ops(asked, early.final)
            early.finish()
        except BaseException:
            early.give_up()
            raise
        self._early = None
        return work, early.norms() if checked else []

    def _run_ops(self, asked: ScheduleCall, final: FinalGradients | None = None) -> MegatronWork:
        work = self._work(self._routes, asked, final)
        run_training(work, self._routes, self._exchange, asked.model)
        return work

    def evaluate(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        args, count = self._runtime.job.args, call["num_microbatches"]
        own = self.view.evaluation_order(count)
        if not own:
            return []
        rows, row = boundary_of(args, args.eval_micro_batch_size)
        split, direct = self._runtime.job.own.sequence_parallel, self._direct is not None
        steps = evaluation_routes(self.view, count, split, rows, direct)
        work = self._work(steps, _schedule_call(call))
        run_evaluation(work, steps, self._exchange, row)
        return self._evaluations.losses(own, work.reported, count)

    def _work(
        self, steps: tuple[Step, ...], asked: ScheduleCall, final: FinalGradients | None = None
    ) -> MegatronWork:  # fmt: skip
        runtime = self._runtime
        return MegatronWork(self.view, steps, asked, runtime.probes, lambda: runtime.pads.pad_op, final)

    def share_gradients(self) -> None:
        self._runtime.reach("grad-sync")  # Megatron's own is never called
        model, shares = self._runtime.held.live.model, self.view.shares
        if self.view.works:
            sum_inside_stage(model)
        views = summed_views(model, shares)
        direct, counted = self._direct, shares.contributed
        if direct is None:
            self._sum_through_host(views)
        else:
            direct.taking_memory(lambda: sum_between_devices(self._sums, views, counted, direct, self.view.worker))
        if self.averaging.per_token:
            divide_by_tokens(model, self.everybody, float(self._tokens))

    @cached_property
    def _sums_early(self) -> bool:
        """Whether sums begin in the backward pass; the same on every worker."""
        own = self._runtime.setup.sizes.own(self._runtime.job.args)
        return self._direct is None and bool(own["overlap_grad_reduce"])

    def _sum_through_host(self, views: Views) -> None:
        """What has not been summed yet."""
        counted = self.view.shares.contributed
        if not self._sums_early:
            sum_gradients(self._buckets, views, counted)
            return
        if not self.view.works:
            sum_gradients(self._buckets_of(False), views, counted)
        if self._was_run_again():
            sum_gradients(self._buckets_of(False), views, counted)
        sum_gradients(self._buckets_of(True), views, counted)

    def _was_run_again(self) -> bool:
        """Whether the early sums are of an earlier round than the iteration's last one. Workers tell standbys."""
        again = torch.tensor([float(self._rounds > 1)])
        self._rounds = 0
        if self.view.plan.standbys:
            self.everybody.sum(again)
        return bool(again)

    def _buckets_of(self, whole: bool) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.is_whole == whole]

    @cached_property
    def _sums(self) -> tuple[SliceSum, ...]:
        return slice_sums(self.view.plan, self.view.tied_head)

    def replicas_agree(self, megatrons: Callable[[], bool]) -> bool:
        told: list[Any] = [None] * len(self.view.rank_order)
        dist.all_gather_object(told, self.state.digests(self._runtime.held.live))
        found: dict[str, set[str]] = {}
        for key, digest in (pair for digests in told for pair in digests.items()):
            found.setdefault(key, set()).add(digest)
        return all(len(digests) == 1 for digests in found.values())

    def losses(self, found: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        """What was agreed on: Megatron has averaged over one replica only."""
        return agreed_losses(self.view, outcome)

    def consume_documents(self, original: Callable[[], DocumentCounts]) -> DocumentCounts:
        """What was agreed on, without asking others again."""
        documents.forget()
        found, self._runtime.progress.documents = self._runtime.progress.documents, NO_DOCUMENTS
        return (None, None) if found == NO_DOCUMENTS else found


def _tell_of_lost_overlap(own: dict[str, Any], sums_early: bool) -> None:
    """`own`: what the arguments say in the job's own layout."""
    lost = [name for name in UNLIKE_REPLICAS if own.get(name) and not (sums_early and name == "overlap_grad_reduce")]
    if lost:
        named = " and ".join(map(flag_of, lost))
        what = ", and ".join(dict.fromkeys(UNLIKE_REPLICAS[name] for name in lost))
        print(f"resihp: under this plan, whose replicas differ, {named} can't be followed: {what}", flush=True)


def _schedule_call(call: dict[str, Any]) -> ScheduleCall:
    """Of the iterators that an interleaved job has for its own chunks, the first does for all chunks of the plan."""
    feeds = call["data_iterator"]
    feed = feeds[0] if isinstance(feeds, list) else feeds
    return ScheduleCall(call["forward_step_func"], feed, call["model"], call["num_microbatches"])


class HeterogeneousCounts(Counts):
    """Counts by slices, each of which one holder counts."""

    def __init__(self, runtime: Runtime, view: HeterogeneousView) -> None:
        self._runtime, self._shares = runtime, view.shares
        self._own_degree = runtime.job.own.tensor_parallel

    def norm_squared(self) -> float:
        return counted_norm_squared(self._runtime.held.live.model, self._shares, self._own_degree)

    def zeros(self) -> int:
        return zeros_in(counted_gradients(self._runtime.held.live.model, self._shares, self._own_degree))

    def parameters_norm(self, original: ParametersNorm) -> float:
        """Megatron's groups are of one stage each."""
        runtime = self._runtime
        own = counted_parameters_squared(
            runtime.held.live.model, self._shares, self._own_degree, runtime.job.counts_masters
        )
        total = torch.tensor([own], dtype=torch.float64, device="cuda")
        dist.all_reduce(total)
        return math.sqrt(float(total))


class HeterogeneousState(ModeState):
    """Chunks, each built as a stage of its own, and all of the optimizer's state of their slices."""

    def __init__(self, runtime: Runtime, view: HeterogeneousView) -> None:
        self._runtime, self._view = runtime, view
        self.checkpoint_metadata = whole_metadata(runtime.job)

    def build_model(self, call: partial[Any]) -> Any:
        view, model = self._view, []
        for number in view.own_chunks:
            with as_stage(number, len(view.chunks)):
                model += call(pg_collection=ProcessGroupCollection.use_mpu_process_groups())
        treat_all_alike(model)
        # The worker that has the head reports losses; Megatron asks the first chunk's wrapper for that. What it wraps
        # keeps its own place: a last stage's output is made 32 bits wide.
        groups = copy.copy(get_attr_wrapped_model(model[0], "pg_collection"))
        groups.pp = StageGroup(view.own_chunks[-1 if view.is_last_stage else 0], len(view.chunks))
        model[0].pg_collection = groups
        return model

    def succeeds(self, held: Sequence[Shard], wanted: Sequence[Shard]) -> dict[int, int]:
        """None in a job with parts, whose state may come from them."""
        return {} if self._runtime.job.shares_optimizer else super().succeeds(held, wanted)

    def migrate(self, order: EpochPlan, trained: Trained) -> Migrated:
        runtime = self._runtime
        if not (runtime.job.shares_optimizer and are_there_parts(runtime)):
            return Migrated(*migrate_slices(runtime, order, trained))
        gathered, whole = put_together(runtime)
        moved, digests = migrate_slices(runtime, order, trained, whole)
        return Migrated(gathered + moved, digests)

    def digests(self, trained: Trained) -> dict[str, str]:
        shares = self._view.shares
        return Holding(trained, shares.own, shares.cuts, shares.tied_head).digests()

    def is_loadable(self) -> bool:
        """Megatron loads a distributed optimizer's count of steps and moments, which the first step makes."""
        job = self._runtime.job
        return not job.shares_optimizer or job.args.no_save_optim or has_stepped(self._runtime.held.live.optimizer)

    @contextmanager
    def saving(self) -> Iterator[str]:
        with distributed_format(self._runtime.job.args, self._view.reports) as name:
            yield name

    def state_dict(self, call: partial[dict[str, Any]]) -> dict[str, Any]:
        runtime = self._runtime
        return state_in_parts(call, args_with(runtime.setup.sizes, runtime.job.args), self._view)
