# SPDX-License-Identifier: Apache-2.0
"""The emulated clock: what each op and transfer of a CPU worker would cost on a device, given the model that it holds.

May import megatron and this package. Real work is done on tiny tensors; `padding` sleeps for the rest, on no core.
"""

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import unwrap_model

from megatron_resihp.cost.profile import DeviceProfile, LayerKind, PassCost, load_profile
from megatron_resihp.integration.job import type_between_layers
from megatron_resihp.integration.probes.padding import Padding, StageCosts
from megatron_resihp.integration.runtime import Runtime


def padding_of(runtime: Runtime, profile_name: str) -> Padding:
    """The padding of this worker, from Megatron's arguments and whatever model it holds at the time.

    Raises:
        ProfileError: if the profile cannot be used.
    """
    args = runtime.job.args
    profile = load_profile(profile_name)
    return Padding(
        profile,
        runtime.worker,
        HeldCosts(profile, runtime),
        tokens_per_token=profile.sequence / args.seq_length,
        bytes_per_token=args.hidden_size * type_between_layers(args).itemsize,
        slowness=lambda: runtime.control.heard.slowness,
        interrupted=runtime.control.heard.broken,
    )


class HeldCosts:
    """The costs of the model chunks that a worker holds, computed anew in every epoch."""

    def __init__(self, profile: DeviceProfile, runtime: Runtime) -> None:
        self._profile = profile
        self._runtime = runtime
        self._epoch: int | None = None
        self._costs: StageCosts = ()

    def __call__(self) -> StageCosts:
        if self._epoch != self._runtime.epoch:
            degree = parallel_state.get_tensor_model_parallel_world_size()
            chunks = unwrap_model(self._runtime.held.live.model)
            costs = [self._profile.stage(layer_kinds(chunk), degree) for chunk in chunks]
            if not self._runtime.mode.splits_backward:
                costs = [(forward, backward + weight, PassCost()) for forward, backward, weight in costs]
            self._costs = costs
            self._epoch = self._runtime.epoch
        return self._costs


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
