# SPDX-License-Identifier: Apache-2.0
"""Uniform plans: Megatron's own groups and schedule, its own sums of gradients, whole shards of the job's own layout.

With the distributed optimizer the replicas of a shard own parts of its state (`modes.shared_out`). May import megatron
and this package.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_resihp.executor.gloo.groups_ahead import WorldGroup
from megatron_resihp.executor.groups.side_group import MakeSideGroup
from megatron_resihp.integration import releases
from megatron_resihp.integration.modes.migration import digests_by_slice, migrate_shards, migrate_slices, own_shards
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
from megatron_resihp.integration.modes.overlaps import ALL_EXPERTS, WITH_ALL_EXPERTS, flag_of
from megatron_resihp.integration.patches.checkpoints import distributed_format
from megatron_resihp.integration.patches.experts.sharing import steps_experts
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.digests import shard_digest
from megatron_resihp.integration.state.reshardable import RESHARDABLE, TYPE
from megatron_resihp.integration.state.slice_state import zeros_in
from megatron_resihp.integration.step.buddies import broadcast_gradients, join_buddies
from megatron_resihp.integration.step.expert_ring import (
    copy_digests,
    fresh_copies,
    join_expert_ring,
    keepers_under,
    share_expert_gradients,
)
from megatron_resihp.integration.step.loss_scale import Averaging, scaled_losses
from megatron_resihp.integration.step.optimizer_buddies import Ring
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.integration.world.context_groups import context_ranks, make_context_groups
from megatron_resihp.integration.world.group_needs import groups_wanted, of_gloo, timeout_of, world_group
from megatron_resihp.integration.world.streams import start_streams
from megatron_resihp.integration.world.view import UniformView
from megatron_resihp.pipeline.orders import group_for
from megatron_resihp.plan import data_parallel_of
from megatron_resihp.plan.parallel_plan import shared_with
from megatron_resihp.protocol.published import EpochPlan
from megatron_resihp.protocol.records import Outcome

INSTANCES, CONTEXT = "num_distributed_optimizer_instances", "context_parallel_size"
EXPERTS, MEMBERS = "expert_model_parallel_size", "expert_tensor_parallel_size"


class UniformMode(Mode):
    """A plan that Megatron's own groups can run."""

    view: UniformView
    state: "UniformState"

    def __init__(self, runtime: Runtime, view: UniformView, make_group: MakeSideGroup) -> None:
        self.view = view
        self.state = self._make_state(runtime)
        self.everybody = make_group("everybody", view.plan.members)
        self.averaging = averaging_of(runtime, *_shared_averaging(view))
        self._runtime = runtime
        self.counts = UniformCounts(runtime, self.counts_part, self.instances)
        self._join(make_group)

    @property
    def instances(self) -> int:
        """In how many parts the replicas are divided, each of which has all of a distributed optimizer's state."""
        return 1

    def _make_state(self, runtime: Runtime) -> "UniformState":
        return UniformState(runtime, self.view)

    def _join(self, make_group: MakeSideGroup) -> None:
        coordinate = self.view.plan.coordinate_of(self.view.worker)
        self._buddies = None
        if coordinate is not None:
            self._buddies = join_buddies(self.view.plan, coordinate, self.view.worker, make_group)
        if coordinate is not None and keepers_under(self._runtime, self.view.plan):
            self.state.ring = join_expert_ring(self.view.plan, coordinate, self.view.worker, make_group)

    def close(self) -> None:
        super().close()
        self._buddies = self.state.ring = None

    def wanted_groups(self) -> list[WorldGroup]:
        order, args = self.view.rank_order, self._runtime.job.args
        rank, build = order.index(self.view.worker), self._runtime.setup.build_groups
        wanted = groups_wanted(rank, len(order), build.args, build.keywords | self._degrees)
        wanted += [(WorldGroup(tuple(ranks), timeout_of(args)), None) for ranks in context_ranks(self.view)]
        return of_gloo([(world_group(args, len(order)), None), *wanted], args.distributed_backend)

    @property
    def _sizes(self) -> dict[str, Any]:
        """What Megatron is told of this plan that may be otherwise in the job's own layout."""
        plan = self.view.plan
        experts = plan.expert_parallel * self._runtime.job.own.expert_groups
        context = len(shared_with(plan, self.view.replica))
        return {INSTANCES: self.instances, CONTEXT: context, EXPERTS: experts}

    @property
    def _degrees(self) -> dict[str, Any]:
        """What groups are made by. Without experts, those of experts are made too, and do nothing. Where replicas are
        counted last, Megatron wants as many ranks of each in a row there as share sequences and layers. Groups that
        share sequences are made afterwards where they differ."""
        plan, args = self.view.plan, self._runtime.job.args
        context = 1 if plan.context_groups else plan.context_parallel
        sizes = self._sizes | {CONTEXT: context}
        if args.num_experts:
            return sizes
        sharers = context if args.use_tp_pp_dp_mapping else 1
        return sizes | {MEMBERS: plan.grid.tensor_parallel * sharers}

    @property
    def _lost_overlap(self) -> dict[str, bool]:
        return WITH_ALL_EXPERTS if self._sizes[EXPERTS] == 1 else {}

    def build_groups(self) -> None:
        sizes, lost = self._runtime.setup.sizes, self._lost_overlap
        own = sizes.own(self._runtime.job.args)
        for name, instead in ALL_EXPERTS.items() if lost and self.view.reports else ():
            if own.get(name):
                print(f"resihp: under this plan each worker has all experts: {flag_of(name)} is off, as {instead}",
                      flush=True)  # fmt: skip
        sizes.restore(self._sizes | lost)
        self._runtime.setup.build_groups(**self._degrees)
        make_context_groups(self.view, self._runtime.job.args)
        start_streams(self._runtime.job.args, self._runtime.epoch)

    def train(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        """Those that share experts run as many micro-batches as the one that has most. What a replica runs beyond its
        own counts nothing (`patches.experts.additional_rounds`)."""
        rounds = len(self.view.read_order)
        with scaled_losses(self.averaging, self._runtime.held.live.optimizer, call["model"], rounds):
            return _run(self.view, schedule, call, rounds)[: len(self.view.counted)]

    def evaluate(self, schedule: Schedule, call: dict[str, Any]) -> Losses:
        """A replica that has nothing to evaluate takes part in the sums over replicas. One with less than Megatron's
        schedule can run, or than those that share experts with it, makes up for it. All do so with micro-batches that
        count nothing."""
        count = call["num_microbatches"]
        share = len(self.view.evaluation_share(count))
        losses = _run(self.view, schedule, call, self.view.evaluation_runs(count))
        return _counting(losses, share)

    def share_gradients(self) -> None:
        if self._buddies is not None:
            broadcast_gradients(self._runtime.held.live, self._buddies)
        held, ring = self._runtime.held, self.state.ring
        if held.experts is not None and ring is not None:
            share_expert_gradients(held.live, held.experts, ring, self.view.worker)

    def counts_part(self, part: Any) -> bool:
        """Whether this worker's gradients of one of its optimizers enter the norm: exactly one holder's of each do."""
        holders = self.view.plan.expert_parallel if steps_experts(part) else 1
        return self.view.works and self.view.replica < holders

    def losses(self, found: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
        return found

    def consume_documents(self, original: Callable[[], DocumentCounts]) -> DocumentCounts:
        return original()


def _run(view: UniformView, schedule: Schedule, call: dict[str, Any], count: int) -> Losses:
    """Run so many micro-batches, in groups that go together with that number where the pipeline is interleaved."""
    wanted = view.micro_batch_group
    if wanted is not None:
        config = get_model_config(call["model"][0])
        config.microbatch_group_size_per_vp_stage = group_for(view.plan.grid.pipeline_parallel, count, wanted)
    return schedule(**{**call, "num_microbatches": count})


def _counting(losses: Losses, share: int) -> Losses:
    """The same, of which only the first `share` count. Megatron adds up sums and numbers of tokens. It divides losses
    that are one number by how many there are: so the mean of those that count stands for each of the others."""
    counted = losses[:share]

    def nothing(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.numel() > 1:
            return torch.zeros_like(value)
        return torch.stack([each[name] for each in counted]).mean(0) if counted else value

    return counted + [{name: nothing(name, value) for name, value in each.items()} for each in losses[share:]]


@dataclass(frozen=True)
class _InParts:
    """Stands for a chunk: those of its parameters whose masters are in parts with a distributed optimizer."""

    chunk: Any

    def parameters(self) -> Iterator[Any]:
        return (each for each in self.chunk.parameters() if getattr(each, "main_param_sharded", False))


class UniformCounts(Counts):
    """Counts by whole shards.

    Args:
        counting: whether this worker's gradients of an optimizer are counted.
        instances: of the distributed optimizer, under this plan.
    """

    def __init__(self, runtime: Runtime, counting: Callable[[Any], bool], instances: int) -> None:
        self._runtime, self._counting, self._instances = runtime, counting, instances

    def norm_squared(self) -> float:
        total = 0.0
        for gradients in self._counted():
            norms = torch.stack(torch._foreach_norm([gradient.float() for gradient in gradients])).double()
            total += float((norms * norms).sum())
        return total

    def zeros(self) -> int:
        return zeros_in(gradient for gradients in self._counted() for gradient in gradients)

    def parameters_norm(self, original: ParametersNorm) -> float:
        """Megatron counts masters once for each instance of the optimizer, of which the plan may have others than the
        job's own layout."""
        model, own = self._runtime.held.live.model, self._runtime.job.counts_masters
        norm = original(model)
        if own in (0, self._instances):
            return norm
        in_parts = original([_InParts(chunk) for chunk in model])
        return math.sqrt(norm**2 + (own / self._instances - 1) * in_parts**2)

    def _counted(self) -> Iterator[list[torch.Tensor]]:
        list_gradients = releases.current().norm_gradients
        for part in parts_of(self._runtime.held.live.optimizer) if self._runtime.view.works else ():
            counted = part.get_parameters() and self._counting(part)
            gradients = getattr(part, list_gradients)() if counted else []
            if gradients:
                yield gradients


class UniformState(ModeState):
    """Whole shards of the job's own layout, as Megatron builds and saves them.

    Where fewer replicas share experts than in the job's own layout, it saves what can be loaded under any degree.

    Attributes:
        ring: in which gradients of experts pass that are held once; None: this worker's aren't.
    """

    def __init__(self, runtime: Runtime, view: UniformView) -> None:
        self._runtime, self._view = runtime, view
        self.ring: Ring | None = None
        self._has_own_experts = view.plan.expert_parallel == runtime.job.own.expert_parallel
        # Megatron's default format has the optimizer's buffers, which hold other experts under other degrees.
        resharded = runtime.job.shares_optimizer and not self._has_own_experts
        self.checkpoint_metadata = {TYPE: RESHARDABLE} if resharded else {}

    def build_model(self, call: partial[Any]) -> Any:
        return call()

    def migrate(self, order: EpochPlan, trained: Trained) -> Migrated:
        held = own_shards(self._runtime, order) if order.plan.expert_parallel == 1 else None
        if held is not None:
            return Migrated(*migrate_shards(self._runtime, order, trained, held))
        moved, digests = migrate_slices(self._runtime, order, trained)
        fresh = fresh_copies(self._runtime, trained, self.ring)
        digests |= copy_digests(self._runtime, trained, fresh.experts)
        return Migrated(moved + fresh.received, digests, None, fresh.experts, fresh.kept)

    def first_copies(self) -> Migrated:
        fresh = fresh_copies(self._runtime, self._runtime.held.live, self.ring)
        return Migrated(fresh.received, {}, None, fresh.experts, fresh.kept)

    def digests(self, trained: Trained) -> dict[str, str]:
        if self._view.plan.expert_parallel > 1:
            found = digests_by_slice(self._runtime, self._view.plan, trained)
            return found | copy_digests(self._runtime, trained, self._runtime.held.experts)
        return shard_digest(trained, self._view.plan.coordinate_of(self._view.worker))

    @contextmanager
    def saving(self) -> Iterator[str]:
        args = self._runtime.job.args
        with (
            nullcontext(args.ckpt_format)
            if self._has_own_experts
            else distributed_format(args, self._view.reports) as name
        ):
            yield name

    def state_dict(self, call: partial[dict[str, Any]]) -> dict[str, Any]:
        # Where groups differ in size, so would what workers' arguments say of it.
        if self._has_own_experts and not self._view.plan.context_groups:
            return call()
        own = copy.copy(self._runtime.job.args)
        vars(own).update(self._runtime.setup.sizes.own(self._runtime.job.args))
        return {**call(), "args": own}


def _shared_averaging(view: UniformView) -> tuple[float, float]:
    """As of `averaging_of`, where replicas may share sequences. Those that do count as one: Megatron divides by all of
    them, and each divides its losses by its own tokens, of which there are so many fewer. Where groups differ, that is
    so for the largest ones, and others make up for it."""
    plan = view.plan
    if not plan.context_groups:
        return data_parallel_of(plan), 1.0
    own = len(shared_with(plan, view.replica)) if view.works else plan.context_parallel
    return len(plan.replicas) / plan.context_parallel, plan.context_parallel / own


def averaging_of(runtime: Runtime, replicas: float, weight: float = 1.0) -> Averaging:
    """`replicas`: by which Megatron divides sums of gradients. `weight`: of this worker's losses."""
    args = runtime.job.args
    whole = args.global_batch_size // args.micro_batch_size
    # Sums that are 16 bits wide must not grow with the micro-batches that a replica gets in a dead one's place.
    half_sums = args.fp16 and not args.accumulate_allreduce_grads_in_fp32
    first = replicas if half_sums else runtime.job.own.data_parallel
    return Averaging(args.calculate_per_token_loss, whole, first, replicas, weight)
