"""How fast an iteration can be at best with the devices that are left, whatever the plan.

Imports numpy, `pipeline` and this room.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from megatron_resihp.cost.device import Device, layer_work
from megatron_resihp.cost.layers import Model
from megatron_resihp.cost.parts import ShardError
from megatron_resihp.cost.training import Training
from megatron_resihp.pipeline.op import OpKind


@dataclass(frozen=True)
class IterationBound:
    """Seconds that no plan can beat, without gradient reduction and optimizer.

    Attributes:
        work: all FLOPs over the speeds of all workers.
        critical_path: of the slowest micro-batch, every layer shared by the fastest workers.
        fits: whether memory holds one copy of weights, gradients and optimizer at all.
    """

    work: float
    critical_path: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Infinite if no plan fits."""
        return max(self.work, self.critical_path) if self.fits else float("inf")


def iteration_bound(
    model: Model, training: Training, device: Device, speed: Mapping[int, float], tokens: ArrayLike, squares: ArrayLike
) -> IterationBound:
    """The bound for a given health.

    Work conservation: a worker in a group of degree k does at most p · rate(k) FLOP/s of the model, so all together
    take no less than the work over Σ p · max rate. Critical path: F and B of each layer, one after another, each no
    faster than the k fastest workers at rate(k), for the best k that can share the layers. W is left out of it: it may
    be run beside.

    Args:
        model, training, device: what is run on what.
        speed: p of every live worker, in (0, 1].
        tokens, squares: N and Σ l² of all micro-batches of an iteration, each [micro-batches].
    """
    workload = np.stack([np.asarray(tokens, np.float64), np.asarray(squares, np.float64)])
    work = layer_work(model, training, 1).sum(axis=1)
    fastest = list(accumulate(sorted(speed.values(), reverse=True)))
    rates = {degree: device.rate(degree) for degree in range(1, len(fastest) + 1) if _can_share(model, degree)}
    group = max((rates[degree] * fastest[degree - 1] for degree in rates), default=0.0)
    chain = float((work[[OpKind.F, OpKind.B]] @ workload).sum(axis=0).max(initial=0.0))
    state = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
    everything = float((work @ workload).sum())
    return IterationBound(
        work=everything / (fastest[-1] * max(rates.values())) if rates else float("inf"),
        critical_path=chain / group if rates else float("inf"),
        fits=model.parameters * state <= device.memory * len(speed),
    )


def _can_share(model: Model, degree: int) -> bool:
    try:
        for layer in set(model.layers):
            for part in layer.parts:
                part.share(degree, 0)
    except ShardError:
        return False
    return True
