# SPDX-License-Identifier: Apache-2.0
"""The cost of work in a running job: from its workers' reports, the emulated device, or fitted costs.

Imports numpy, `plan`, `protocol.planning` and this package.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from megatron_resihp.config import HOST
from megatron_resihp.cost.device import NETWORK_BANDWIDTH, Device, layer_work
from megatron_resihp.cost.emulated import FLOPS, device_of, seconds_of
from megatron_resihp.cost.exchange import exchange_seconds, nearest
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.cost.host_sums import HostSums
from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S, Array, JobCost
from megatron_resihp.cost.model.layers import Model, ModelError, model_from_arguments
from megatron_resihp.cost.profile import DeviceProfile, ProfileError, load_profile
from megatron_resihp.cost.room import usable
from megatron_resihp.cost.training import Training, TrainingError, training_of_job
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan import Chunk, OwnSplit
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.protocol.planning import KnownJob

_MEMORY: Final = 80 << 30
_HOST_BANDWIDTH: Final = 2e9
"""Bytes/s of what gloo carries between two processes through host memory; measured on one machine, docs/gpu.md."""
_HOST_SUMS_BANDWIDTH: Final = 1.4e9
"""Bytes/s of gradients that gloo sums so; measured there too."""
_OWN_SUMS: Final = "gradient_sync"
"""Among the terms of fitted costs, what Megatron's own groups need to sum gradients."""
F, B, W = OpKind


class UnknownCost(Exception):
    """Too little is known of a job to plan for it; the message says what is missing."""


def cost_of_job(
    job: KnownJob, workers: int, workers_per_node: int, own: Sequence[Chunk], fitted: CostModel | None
) -> JobCost:
    """The costs of a plan's parts.

    Args:
        job: what workers reported at the start.
        workers, workers_per_node: of the job.
        own: the job's own split into layers, with which `fitted` was fitted.
        fitted: the detector's costs of healthy ops; None if there are none yet.

    Raises:
        UnknownCost: the arguments do not determine the model or its training.
    """
    if job.arguments is None:
        raise UnknownCost("the workers have not told the model's sizes")
    try:
        split = OwnSplit(tuple(own), job.tensor_parallel)
        model, training = model_from_arguments(job.arguments), training_of_job(job.arguments, split)
    except (ModelError, TrainingError) as error:
        raise UnknownCost(str(error)) from None
    if len(model.layers) != own[-1].end:
        raise UnknownCost(f"the arguments give {len(model.layers)} layers, the job has {own[-1].end}")
    shared = job.sharings[0]
    training = replace(
        training,
        expert_groups=job.tensor_parallel // (shared.members or job.tensor_parallel),
        # The emulated device takes as long for any expert's tokens.
        busiest_shares=() if job.emulated else job.busiest_shares,
    )
    memory = usable(job.device_memory or _MEMORY, job.memory_reserve)
    host = job.host_memory or 0
    device, alone = Device(FLOPS, bandwidth=NETWORK_BANDWIDTH, memory=memory, host=host), None
    measured = dict[int, Array]()
    if job.emulated:
        profile = _profile(job.emulated)
        device = device_of(profile, model, training, memory, workers)
        measured = seconds_of(profile, model, training, workers)
    elif fitted is not None:
        exchanged = _exchanged(job, model, training, device, workers_per_node, 1 + max(each.stage for each in own))
        alone = _fitted_seconds(fitted, model, training, own, job.tensor_parallel, shared, exchanged)
    own_sums_s, rest_s = (0.0, 0.0) if fitted is None or alone is None else _outside(fitted)
    through_host = job.carrier == HOST and not job.emulated
    return JobCost(
        model=model, training=training, device=device, micro_batches=job.micro_batches,
        workers_per_node=workers_per_node, alone=alone, measured=measured,
        until_next_event_s=UNTIL_NEXT_EVENT_S,
        unlike_bandwidth=_HOST_BANDWIDTH if through_host else float("inf"),
        state_bandwidth=float("inf") if job.emulated else _HOST_BANDWIDTH,  # whatever carries results
        host_sums=HostSums(tuple(own), _HOST_SUMS_BANDWIDTH) if through_host else None,
        own_sums_s=own_sums_s, rest_s=rest_s,
        sharings=job.sharings,
        replica_workers=job.tensor_parallel * len({each[0] for each in own}) if job.shares else None,
        equal_rounds=job.equal_rounds,
    )  # fmt: skip


def _outside(fitted: CostModel) -> tuple[float, float]:
    """Seconds of an iteration outside its pipelines: of the sums of gradients, and of all else.

    The rest is below 0 where spans overlap with ops. Together they are what the iterations of warm-up took longer than
    their pipelines.
    """
    sums = fitted.terms.get(_OWN_SUMS, 0.0)
    others = sum(fitted.terms.values()) - sums
    return max(sums + min(others, 0.0), 0.0), max(others, 0.0)


def _profile(name: str) -> DeviceProfile:
    try:
        return load_profile(name)
    except ProfileError as error:
        raise UnknownCost(str(error)) from None


def _fitted_seconds(
    fitted: CostModel, model: Model, training: Training, own: Sequence[Chunk], degree: int, shared: Sharing,
    exchanged: Array,
) -> Array | None:  # fmt: skip
    """Seconds of F, B and W of each layer on a device alone, [3, layers]: each chunk's time, divided by FLOPs.

    None if the fit is of other stages or chunks, or lacks some of them.

    Args:
        shared: how many replicas shared each sequence and each layer's experts when the costs were learned: each did
            so small a part of a micro-batch, and waited for the one with the busiest experts.
        exchanged: how long they exchanged in each layer meanwhile, which was measured with the rest, [3, layers].
    """
    stages = 1 + max(chunk.stage for chunk in own)
    if fitted.ops.gamma.shape[0] != stages or fitted.ops.gamma.shape[2] * stages < len(own):
        return None
    part = (np.full((stages, 1), whole / shared.context) for whole in (training.tokens, training.squares))
    durations = fitted.durations(np.arange(stages), *part)[..., 0]
    work = _work(model, training.as_plans_say(shared.experts), degree)
    alone = np.zeros(work.shape)
    for number, (stage, first, end) in enumerate(own):
        of_chunk, measured = work[:, first:end], durations[stage, :, number // stages]
        for kinds, seconds in (([F], measured[F]), ([B, W], np.nansum(measured[[B, W]]))):
            # The exchange is estimated, with a usual network: it may not explain away what was measured.
            total, computed = of_chunk[kinds].sum(), seconds - min(exchanged[kinds, first:end].sum(), seconds / 2)
            if not (computed > 0 and total > 0):
                return None
            alone[kinds, first:end] = shared.context * computed * of_chunk[kinds] / total
    whole = _work(model, training, 1)
    share = np.divide(whole, work, out=np.ones_like(work), where=work > 0)
    return alone * share


def _exchanged(
    job: KnownJob, model: Model, training: Training, device: Device, workers_per_node: int, stages: int
) -> Array:
    """Seconds in which those that share sequences or experts in the job's own layout exchange, [3, layers]."""
    shared = job.sharings[0]
    if shared.together == 1 and training.expert_groups == 1:
        return np.zeros((len(OpKind), len(model.layers)))
    rows = [number // shared.context * (1 if job.pipeline_last else stages) for number in range(shared.together)]
    firsts = [job.tensor_parallel * (number % shared.context + shared.context * row) for number, row in enumerate(rows)]
    training = replace(training.as_plans_say(shared.experts), context_parallel=shared.context)
    near = nearest([(first,) for first in firsts], workers_per_node)
    return exchange_seconds(model, training, device, job.tensor_parallel, near)


def _work(model: Model, training: Training, degree: int) -> Array:
    work: Array = layer_work(model, training, degree) @ np.array([training.tokens, training.squares])
    return work
