# SPDX-License-Identifier: Apache-2.0
"""The emulated clock: what each op and transfer of a CPU worker would cost on a device, given the model that it holds.

May import megatron and this package. Real work is done on tiny tensors; `padding` sleeps for the rest, on no core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import unwrap_model

from megatron_resihp.cost.profile import DeviceProfile, LayerKind, PassCost, load_profile
from megatron_resihp.detector.input.records import OpKind
from megatron_resihp.integration.job import type_between_layers
from megatron_resihp.integration.probes.padding import Padding, StageCosts
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.plan import OwnSplit, PlanError, spelled_out
from megatron_resihp.plan.parallel_plan import sharing_of

if TYPE_CHECKING:
    from megatron_resihp.cost.job import Array
    from megatron_resihp.cost.meeting import Meeting


def padding_of(runtime: Runtime, profile_name: str) -> Padding:
    """The padding of this worker, from Megatron's arguments and whatever model it holds at the time.

    Raises:
        ProfileError: if the profile cannot be used.
    """
    args = runtime.job.args
    profile = load_profile(profile_name)
    costs = HeldCosts(profile, runtime)
    return Padding(
        profile,
        runtime.worker,
        costs,
        tokens_per_token=profile.sequence / args.seq_length,
        bytes_per_token=args.hidden_size * type_between_layers(args).itemsize,
        slowness=lambda: runtime.control.heard.slowness,
        interrupted=runtime.control.heard.broken,
        exchanged=costs.exchanged,
    )


class HeldCosts:
    """The costs of the model chunks that a worker holds, computed anew in every epoch."""

    def __init__(self, profile: DeviceProfile, runtime: Runtime) -> None:
        self._profile = profile
        self._runtime = runtime
        self._epoch: int | None = None
        self._costs: StageCosts = ()
        self._meeting: Meeting | None = None

    def __call__(self) -> StageCosts:
        self._look()
        return self._costs

    def exchanged(self, kind: OpKind, chunk: int) -> float:
        """Seconds in which an op waits for tokens, or keys and values, over the slowest link that they take."""
        self._look()
        if self._meeting is None:
            return 0.0
        slowness = self._runtime.control.heard.slowness
        slowest = min((slowness.link(*link) for link in self._meeting.links), default=1.0)
        return float(self._meeting.seconds[kind, chunk]) / slowest

    def _look(self) -> None:
        if self._epoch == self._runtime.epoch:
            return
        degree = parallel_state.get_tensor_model_parallel_world_size()
        chunks = unwrap_model(self._runtime.held.live.model)
        costs = [self._profile.stage(layer_kinds(chunk), degree) for chunk in chunks]
        self._meeting = self._met()
        if self._meeting is not None:
            costs = [_times(each, self._meeting.work[:, number]) for number, each in enumerate(costs)]
        if not self._runtime.mode.splits_backward:
            costs = [(forward, backward + weight, PassCost()) for forward, backward, weight in costs]
        self._costs = costs
        self._epoch = self._runtime.epoch

    def _met(self) -> Meeting | None:
        """What this worker's ops take longer since it shares with others, as planners count it; None: nothing, or they
        don't know the model."""
        own, plan = self._runtime.job.own, self._runtime.view.plan
        if sharing_of(plan) == 1 and own.expert_groups == 1:
            return None
        # These take a while to import, and are wanted only here.
        from megatron_resihp.cost.emulated import cost_on
        from megatron_resihp.cost.meeting import meeting_of
        from megatron_resihp.cost.model.layers import ModelError
        from megatron_resihp.cost.training import TrainingError

        try:
            cost = cost_on(
                self._profile, vars(self._runtime.job.args), OwnSplit(own.chunks, own.tensor_parallel),
                workers=1 + max(plan.members), micro_batches=1, memory=0, expert_groups=own.expert_groups,
            )  # fmt: skip
            return meeting_of(spelled_out(plan, own.chunks), self._runtime.worker, cost)
        except (ModelError, TrainingError, PlanError):
            return None


def _times(passes: tuple[PassCost, PassCost, PassCost], work: Array) -> tuple[PassCost, PassCost, PassCost]:
    """The passes of a chunk, each of which takes so many times as long."""
    forward, backward, weight = (
        cost.scaled(factor, factor) for cost, factor in zip(passes, work.tolist(), strict=True)
    )
    return forward, backward, weight


def layer_kinds(chunk: Any) -> list[LayerKind]:
    """What a model chunk of Megatron consists of."""
    ends = ([LayerKind.EMBEDDING] * chunk.pre_process, [LayerKind.HEAD] * chunk.post_process)
    predicting = chunk.mtp.layers if hasattr(chunk, "mtp") else ()
    further = [kind for layer in predicting for kind in (_layer_kind(layer.mtp_model_layer), LayerKind.HEAD)]
    return [*ends[0], *(_layer_kind(layer) for layer in chunk.decoder.layers), *ends[1], *further]


def _layer_kind(layer: Any) -> LayerKind:
    if not hasattr(layer, "self_attention"):
        return LayerKind.MAMBA
    if isinstance(layer.self_attention, IdentityOp):
        return LayerKind.MLP
    if isinstance(layer.mlp, IdentityOp):
        return LayerKind.ATTENTION
    return LayerKind.MOE if isinstance(layer.mlp, BaseMoELayer) else LayerKind.TRANSFORMER
