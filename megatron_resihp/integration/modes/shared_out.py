# SPDX-License-Identifier: Apache-2.0
"""Uniform plans of jobs with Megatron's distributed optimizer: each replica owns a part of the optimizer's state.

A copy of each part is kept by another holder of the shard (`plan.copies`). May import megatron and this package.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.training import get_timers

from megatron_resihp.executor.groups.side_group import MakeSideGroup
from megatron_resihp.integration.modes.migration import digests_by_slice, migrate_slices
from megatron_resihp.integration.modes.mode import Migrated
from megatron_resihp.integration.modes.uniform import UniformMode, UniformState
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.slice_state import HostFiller
from megatron_resihp.integration.step.buddies import nodes_of_job
from megatron_resihp.integration.step.optimizer_buddies import (
    join_ring,
    move_parts,
    part_digests,
    share_counts_with_standbys,
    share_part_gradients,
)
from megatron_resihp.integration.step.optimizer_copy import Kept
from megatron_resihp.integration.step.optimizer_shards import (
    gather_parameters,
    start_gathering_first_chunk,
    step_part,
)
from megatron_resihp.integration.step.optimizer_whole import are_there_parts, parameters_and_buffers, share_out
from megatron_resihp.integration.trained import Trained, parts_of
from megatron_resihp.plan import Shard
from megatron_resihp.plan.copies import instances_under, keeps_copies, kept_copies
from megatron_resihp.protocol.published import EpochPlan


class SharedOutMode(UniformMode):
    """A uniform plan whose replicas step their own parts and then gather the parameters."""

    def _make_state(self, runtime: Runtime) -> "SharedOutState":
        return SharedOutState(runtime, self.view)

    def _join(self, make_group: MakeSideGroup) -> None:
        coordinate = self.view.plan.coordinate_of(self.view.worker)
        self._first_stepped: Any = None
        self._ring = None
        if coordinate is not None and keeps_copies(self.view.plan, self.instances):
            self._ring = join_ring(self.view.plan, coordinate, self.view.worker, make_group)

    def close(self) -> None:
        super().close()
        self._ring = None

    def share_gradients(self) -> None:
        kept = self._runtime.held.kept
        if kept is not None and self._ring is not None:
            live = self._runtime.held.live
            share_part_gradients(live, kept, self._ring, self.view.worker)
            share_counts_with_standbys(live, self.view.plan, kept.coordinate, self._ring)

    @property
    def instances(self) -> int:
        return instances_under(self.view.plan, self._runtime.job.optimizer_instances)

    def counts_part(self, part: Any) -> bool:
        """Each replica counts its part; parts that others have too are counted by the first that do."""
        return self.view.works and self.view.replica * self.instances < len(self.view.plan.replicas)

    @cached_property
    def _beside(self) -> Any:
        """A stream that goes on while the device steps."""
        return torch.cuda.Stream()

    def step(self, optimizer: object) -> None:
        first, *others = parts_of(optimizer)
        step_part(first)
        if self._runtime.job.args.overlap_param_gather_with_optimizer_step:
            self._first_stepped = torch.cuda.current_stream().record_event()
        for part in others:
            step_part(part)

    def after_step(self) -> None:
        # The step is taken: a failure in here leads to the next epoch, where parameters are gathered anew. So does one
        # in the next forward pass, if they are gathered there.
        args = self._runtime.job.args
        if args.overlap_param_gather_with_optimizer_step:
            # Its gathering waits for its own step, not for those of the chunks after it, which the device may be at.
            self._beside.wait_event(self._first_stepped)
            with torch.cuda.stream(self._beside):
                start_gathering_first_chunk(self._runtime.held.live)
        if args.overlap_param_gather:
            return
        self._runtime.reach("gather")
        timer = get_timers()("params-all-gather", log_level=1)
        timer.start()
        gather_parameters(self._runtime.held.live)
        timer.stop()


class SharedOutState(UniformState):
    """Parameters of whole shards, and a part and a copy of the optimizer's state."""

    def succeeds(self, held: Sequence[Shard], wanted: Sequence[Shard]) -> dict[int, int]:
        """None: parameters are in buffers, which each epoch's replicas share out anew."""
        return {}

    def migrate(self, order: EpochPlan, trained: Trained) -> Migrated:
        runtime = self._runtime
        if are_there_parts(runtime):
            moved, kept = move_parts(runtime, trained, self._copied)
            return Migrated(moved, self._digests(trained, kept), kept)
        filler = HostFiller()
        moved, digests = migrate_slices(runtime, order, trained, filler=filler)
        kept = share_out(runtime, trained, filler.whole, self._copied.get(runtime.worker))
        return Migrated(moved, digests | self._digests(trained, kept), kept)

    def first_copies(self) -> Migrated:
        received, kept = move_parts(self._runtime, self._runtime.held.live, self._copied)
        return Migrated(received, {}, kept)

    @property
    def _copied(self) -> dict[int, int]:
        plan = self._view.plan
        return kept_copies(plan, instances_under(plan, self._runtime.job.optimizer_instances), nodes_of_job())

    def digests(self, trained: Trained) -> dict[str, str]:
        return self._digests(trained, self._runtime.held.kept)

    def _digests(self, trained: Trained, kept: Kept | None) -> dict[str, str]:
        """Of parts and parameters, the latter by slice where replicas share experts."""
        runtime, plan = self._runtime, self._view.plan
        found = part_digests(runtime, trained, kept)
        if plan.expert_parallel == 1 or not self._view.works:
            return found
        return found | digests_by_slice(runtime, plan, trained, parameters_and_buffers(trained))
