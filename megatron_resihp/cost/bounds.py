# SPDX-License-Identifier: Apache-2.0
"""The least time of an iteration on the live devices, whatever the plan.

Imports `pipeline` and this package.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from megatron_resihp.cost.job import JobCost
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.plan.rules import Sharing


@dataclass(frozen=True)
class IterationBound:
    """Least seconds of any plan, without gradient reduction and optimizer.

    Attributes:
        work: all FLOPs over the speeds of all workers, beside what these must at least send each other.
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
    as it may run beside them. Where replicas share sequences or experts, the bound is the least of all numbers of them
    with which a replica's memory holds its state. They meet in every layer, so that all of them wait for the one with
    the busiest experts, and all send each other what goes there, with as many of them on a node as it has workers.

    The bound is proven if no group is faster than the device's rates say: `cost.seconds(k)` of every layer is at least
    `cost.seconds(1)` · rate(1) / (k · rate(k)). That holds if nothing, or only `cost.alone`, was measured. Measured
    times of groups (`cost.measured`) count only for k = 1. If groups are measured to be faster, a plan may beat the
    bound, as its times follow from the measured ones. The bound is for typical micro-batches.

    Args:
        cost: of the job on its devices.
        speed: p of every live worker, in (0, 1].
    """
    fastest = list(accumulate(sorted(speed.values(), reverse=True)))
    rates = {
        degree: cost.device.rate(degree) / cost.device.rate(1) for degree in cost.degrees if degree <= len(fastest)
    }
    group = max((rates[degree] * fastest[degree - 1] for degree in rates), default=0.0)
    training = cost.training
    state = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
    possible = [sharing for sharing in cost.sharings if _holds(cost, sharing, len(speed))]
    shared = [cost.shared(sharing.context, sharing.experts) for sharing in possible]
    works = [_work(each, speed, rates) for each in shared] if rates else []
    paths = [float(each.seconds(1)[[OpKind.F, OpKind.B]].sum()) for each in shared]
    return IterationBound(
        work=min(works, default=float("inf")),
        critical_path=min(paths) / group if works else float("inf"),
        fits=cost.model.parameters * state <= cost.device.memory * len(speed),
    )


def _work(cost: JobCost, speed: Mapping[int, float], rates: Mapping[int, float]) -> float:
    """Least seconds if all workers are busy all the time under a job's sharing."""
    training = cost.training
    sharers = max(training.context_parallel, training.expert_parallel)
    sent = min(degree * float(cost.exchange(degree, min(sharers, cost.workers_per_node)).sum()) for degree in rates)
    computed = float(cost.seconds(1).sum()) / max(rates.values())
    done_per_s = sum(count / (computed / p + sent) for p, count in Counter(speed.values()).items())
    return cost.micro_batches * training.context_parallel / done_per_s


def _holds(cost: JobCost, sharing: Sharing, workers: int) -> bool:
    """Whether the memory of a replica's workers holds its state; others have shares of a distributed optimizer."""
    if cost.replica_workers is None:
        return True
    training, held = cost.training, 0.0
    copies = max(workers // cost.replica_workers, 1)
    for part in (part for layer in cost.model.layers for part in layer.parts):
        share = sharing.experts if part.experts else 1
        owners = copies / share if training.distributed_optimizer else 1
        each = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes / max(owners, 1)
        held += 0 if part.copy else part.parameters / share * each
    return held <= cost.device.memory * cost.replica_workers
