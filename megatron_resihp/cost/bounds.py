# SPDX-License-Identifier: Apache-2.0
"""The least time of an iteration on the live devices, whatever the plan.

Imports `pipeline` and this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.op import OpKind


@dataclass(frozen=True)
class IterationBound:
    """Least seconds of any plan, without gradient reduction and optimizer.

    Attributes:
        work: all FLOPs over the speeds of all workers.
        critical_path: of a micro-batch, with every layer on the fastest workers.
        fits: whether memory holds one copy of weights, gradients and optimizer at all.
    """

    work: float
    critical_path: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Infinite if no plan fits."""
        return max(self.work, self.critical_path) if self.fits else float("inf")


def iteration_bound(cost: JobCost, speed: Mapping[int, float]) -> IterationBound:
    """The bound for a given health.

    Work conservation: a worker in a group of degree k does at most p · rate(k) FLOP/s of the model, so all workers
    together take no less than the work over Σ p · max rate. Critical path: F and B of each layer run one after another.
    Each is no faster than on the k fastest workers at rate(k), for the best k that can share the layers. W is left out,
    as it may run beside them.

    The bound is proven if no group is faster than the device's rates say: `cost.seconds(k)` of every layer is at least
    `cost.seconds(1)` · rate(1) / (k · rate(k)). That holds if nothing, or only `cost.alone`, was measured. Measured
    times of groups (`cost.measured`) count only for k = 1. If groups are measured to be faster, a plan may beat the
    bound, as its times follow from the measured ones. The bound is for typical micro-batches.

    Args:
        cost: of the job on its devices.
        speed: p of every live worker, in (0, 1].
    """
    alone = cost.seconds(1)
    fastest = list(accumulate(sorted(speed.values(), reverse=True)))
    rates = {
        degree: cost.device.rate(degree) / cost.device.rate(1) for degree in cost.degrees if degree <= len(fastest)
    }
    group = max((rates[degree] * fastest[degree - 1] for degree in rates), default=0.0)
    training = cost.training
    state = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
    return IterationBound(
        work=cost.micro_batches * float(alone.sum()) / (fastest[-1] * max(rates.values())) if rates else float("inf"),
        critical_path=float(alone[[OpKind.F, OpKind.B]].sum()) / group if rates else float("inf"),
        fits=cost.model.parameters * state <= cost.device.memory * len(speed),
    )
