# SPDX-License-Identifier: Apache-2.0
"""Predicted times of ops and transfers on healthy devices: the cost model as the detector uses it.

Imports numpy and the package `cost`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_resihp.cost.fitted.current import CurrentCost
from megatron_resihp.cost.fitted.fit import Fits, masked_median
from megatron_resihp.cost.fitted.model import CostModel, Link, LinkCost, fit_links, fit_ops
from megatron_resihp.detector.input.observations import IterationObservations, Layout, padded, stacked
from megatron_resihp.detector.input.records import SpanKind
from megatron_resihp.detector.judging.levels import healthy_levels
from megatron_resihp.detector.judging.residuals import plain_average, robust_average
from megatron_resihp.detector.judging.units import alike_links, has_peers
from megatron_resihp.detector.settings import Settings

ENOUGH: Final = 4000
"""Measurements of an op kind in a stage that suffice to fit its cost; more would only take longer."""
LEAST_NOISE: Final = 1e-3
MISFIT: Final = 1.5
"""Ratio of ops' scatter to their noise above which the costs come from other ops."""
IRRELEVANT: Final = 0.01
"""Scatter that does not matter, whatever the noise."""
OTHER_SIZE: Final = 0.05
"""Relative difference of sizes from which the time of a link that was seen with one size only is learned again."""
UNKNOWN: Final = LinkCost(float("nan"), float("nan"), False, float("nan"))


class Expected:
    """Predicts ops and transfers, and turns one iteration's measurements into residuals.

    Attributes:
        hidden: [workers, kinds, chunks] ops whose duration tells nothing about their worker unless waits were timed:
            those of tensor-parallel groups that were seen to wait.
        op_noise: relative standard deviation of an op's own compute.
    """

    def __init__(
        self,
        layout: Layout,
        warm_up: Sequence[IterationObservations],
        shared: NDArray[np.bool_],
        known: CostModel | None = None,
        peer_slowdown: float = Settings.peer_slowdown,
    ) -> None:
        """Fit from warm-up.

        Args:
            layout: of the iterations.
            warm_up: iterations to learn from.
            shared: [workers] whether the worker is in a tensor-parallel group with others.
            known: costs that an earlier run learned; they are only scaled to these iterations. For links, the
                dependence on size stays, while a plain level is learned again.
            peer_slowdown: see `Settings`.
        """
        self._peer_slowdown = peer_slowdown
        self._link_costs: dict[Link, LinkCost] = {}
        self._link_sizes: dict[Link, float] = {}
        if known is None:
            self._stage = layout.stage
            self.hidden = hidden_ops(warm_up, shared)
            self._cost = CurrentCost(CostModel(*self._fit(warm_up)))
            self._relearn(warm_up)
            self._set_links(layout, warm_up, np.full(len(layout.links), np.nan))
        else:
            self._cost = CurrentCost(known)
            self._link_costs = {pair: link for pair, link in known.links.items() if link.informative}
            self.move(layout, warm_up, np.zeros(layout.workers.size), shared, np.full(len(layout.links), np.nan))
        noise = self.model.ops.noise[np.isfinite(self.model.ops.noise)]
        self.op_noise = max(float(np.median(noise)), LEAST_NOISE) if noise.size else LEAST_NOISE

    def _fit(self, warm_up: Sequence[IterationObservations]) -> tuple[Fits, Fits]:
        most = np.bincount(self._stage).max() * max(each.tokens.shape[1] for each in warm_up)
        some = warm_up[:: max(1, len(warm_up) * most // ENOUGH)]
        own = padded([self.own(each) for each in some])
        features = [padded([workload(each)[number] for each in some]) for number in (0, 1)]
        return fit_ops(self._stage, own, np.full_like(own, np.nan), *features)

    def _relearn(self, warm_up: Sequence[IterationObservations]) -> None:
        own = padded([self.own(each) for each in warm_up])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.log(own / padded([self.predicted(each) for each in warm_up]))
        by_worker = np.moveaxis(ratio, 1, 0).reshape(own.shape[1], -1)
        level = np.nan_to_num(masked_median(by_worker, np.isfinite(by_worker)))
        features = [padded([workload(each)[number] for each in warm_up]) for number in (0, 1)]
        self._cost.relearn(self._stage, own * np.exp(-level)[:, None, None, None], *features)

    def _set_links(
        self, layout: Layout, observed: Sequence[IterationObservations], healthy: NDArray[np.float64]
    ) -> None:
        """Fit links that were not known before, and keep the costs of the others, or a slow link would become normal.

        For the same reason, a link that is slow from the start gets its peers' costs.
        """
        sizes = stacked(observed, "transfer_bytes")
        costs = fit_links(layout.links, stacked(observed, "transfer"), sizes)
        by_link = np.moveaxis(sizes, 1, 0).reshape(len(layout.links), sizes.shape[0] * sizes.shape[2])
        usual = masked_median(by_link, np.isfinite(by_link))
        pairs = [(min(pair), max(pair)) for pair in layout.links.tolist()]
        found = [_by_bytes(costs.get(pair, UNKNOWN), float(size)) for pair, size in zip(pairs, usual, strict=True)]
        seconds = np.array([cost.seconds(size) for cost, size in zip(found, usual, strict=True)])
        alike = alike_links(layout)
        with np.errstate(divide="ignore"):
            seen = np.where(seconds > 0, np.log(seconds), np.nan)
        self._resize_links(pairs, usual, seen - healthy, alike)
        level, _ = healthy_levels(seen[None], alike, self._peer_slowdown)
        for pair, cost, size, excess in zip(pairs, found, usual, np.nan_to_num(seen - level), strict=True):
            if pair in costs and pair not in self._link_costs:
                self._link_costs[pair], self._link_sizes[pair] = _faster(cost, float(np.exp(excess))), float(size)
        known = [self._link_costs.get(pair, UNKNOWN) for pair in pairs]
        self._latency = np.array([link.latency for link in known])
        self._per_byte = np.array([link.seconds_per_byte for link in known])
        noise = [link.noise for link in known if np.isfinite(link.noise)]
        self._link_noise = max(float(np.median(noise)), LEAST_NOISE) if noise else LEAST_NOISE

    def _resize_links(
        self, pairs: Sequence[Link], size: NDArray[np.float64], seen: NDArray[np.float64], alike: NDArray[np.int64]
    ) -> None:
        """Scale the costs of links whose transfers have another size than the only one that they were seen with.

        Their latency is unknown, so their time is not in proportion to the bytes. What healthy links of the same kind
        take now tells; of any kind, if there are none.

        Args:
            pairs: the links.
            size: [links] usual bytes of a transfer.
            seen: [links] log of the seconds that healthy links take for them; otherwise NaN.
            alike: [links] as of `alike_links`.
        """
        before = np.array([self._link_sizes.get(pair, np.nan) for pair in pairs])
        plain = np.array([not self._link_costs.get(pair, UNKNOWN).informative for pair in pairs], dtype=bool)
        resized = plain & (size > 0) & (np.abs(size / before - 1) > OTHER_SIZE)
        if not resized.any():
            return
        kept = [self._link_costs.get(pair, UNKNOWN).seconds(each) for pair, each in zip(pairs, size, strict=True)]
        residual = np.where(resized, seen - np.log(kept), np.nan)
        for place in map(int, np.flatnonzero(resized)):
            like = residual[alike == alike[place]]
            known = like if np.isfinite(like).any() else residual
            if np.isfinite(known).any():
                pair = pairs[place]
                self._link_costs[pair] = _faster(self._link_costs[pair], float(np.exp(-np.nanmedian(known))))
                self._link_sizes[pair] = float(size[place])

    @property
    def model(self) -> CostModel:
        """The present cost model."""
        return self._cost.model

    def own(self, observations: IterationObservations) -> NDArray[np.float64]:
        """Seconds of each worker's own compute, shape of `compute`; NaN where unknown.

        An op of a tensor-parallel group lasts as long as its slowest member's op. So all members look alike unless the
        wait in collectives is subtracted.
        """
        timed = np.isfinite(observations.waited)
        own = observations.compute - np.where(timed, observations.waited, 0.0)
        known = (timed | ~self.hidden[..., None]) & observations.reported[:, None, None, None]
        return np.where(known & (own > 0) & np.isfinite(own), own, np.nan)

    def predicted(self, observations: IterationObservations) -> NDArray[np.float64]:
        """Predicted seconds of each op on its worker, shape of `compute`."""
        return self.model.own_compute(self._stage, *workload(observations))

    def workers(self, observations: IterationObservations) -> NDArray[np.float64]:
        """[2, workers] residuals of compute, with and without outliers clipped."""
        own, predicted = self.own(observations), self.predicted(observations)
        return np.stack([robust_average(own, predicted, self.op_noise), plain_average(own, predicted)])

    def links(self, observations: IterationObservations) -> NDArray[np.float64]:
        """[2, links] residuals of transfers, with and without outliers clipped."""
        size = np.nan_to_num(observations.transfer_bytes)
        predicted = self._latency[:, None] + self._per_byte[:, None] * size
        robust = robust_average(observations.transfer, predicted, self._link_noise)
        return np.stack([robust, plain_average(observations.transfer, predicted)])

    def bandwidth(self, link: int, excess: float, size: float) -> float:
        """The share p of its bandwidth that a link has left if transfers of `size` bytes take e^excess times as long.

        Latency does not grow, so p = (1 − f) / (e^excess − f), where f is the share of latency on a healthy link.
        """
        healthy = self._latency[link] + self._per_byte[link] * size
        fixed = self._latency[link] / healthy if healthy > 0 else 0.0
        return float((1 - fixed) / max(np.exp(excess) - fixed, 1 - fixed))

    def learn(
        self,
        observations: IterationObservations,
        level: NDArray[np.float64],
        suspect: NDArray[np.bool_],
        iterations: int,
    ) -> None:
        """Follow slow changes of costs.

        Args:
            observations: of one iteration.
            level: [workers] log of each device's own level relative to its stage's; removed before learning.
            suspect: [workers] whether to learn nothing from the worker.
            iterations: iterations since the last call.
        """
        own = self.own(observations) * np.exp(-level)[:, None, None, None]
        self._cost.update(self._stage, own, np.full_like(own, np.nan), *workload(observations), suspect, iterations)

    def move(
        self,
        layout: Layout,
        settling: Sequence[IterationObservations],
        level: NDArray[np.float64],
        shared: NDArray[np.bool_],
        of_links: NDArray[np.float64],
    ) -> None:
        """Fit to another epoch's plan: scale each stage's cost, and keep its dependence on the workload.

        Args:
            layout: of the new epoch.
            settling: its first iterations.
            level: [workers] log of each device's level, slowness included; NaN for devices that are new. These scale
                only what no other worker shows.
            shared: as in the constructor.
            of_links: [links] log of each healthy link's level; NaN for links that are slow or new.
        """
        stages = int(layout.stage.max()) + 1
        chunks = settling[0].compute.shape[2]
        nearest = [np.minimum(np.arange(count), self.model.ops.alpha.shape[axis] - 1)
                   for axis, count in ((0, stages), (2, chunks))]  # fmt: skip
        ops, collectives = (_select(fits, *nearest) for fits in (self.model.ops, self.model.collectives))
        self._stage = layout.stage
        self.hidden = hidden_ops(settling, shared)
        model = CostModel(ops, collectives)
        ratio = padded([np.log(self.own(each) / model.own_compute(self._stage, *workload(each))) for each in settling])
        of_known = ratio - level[:, None, None, None]
        scale = np.ones(ops.alpha.shape)
        for stage in range(stages):
            for some in (ratio - np.nan_to_num(level)[:, None, None, None], of_known):
                of_stage = np.moveaxis(some[:, layout.stage == stage], (2, 3), (0, 1)).reshape(*scale.shape[1:], -1)
                known = np.isfinite(of_stage).any(axis=-1)
                scale[stage][known] = np.exp(np.nanmedian(of_stage[known], axis=-1))
        self._cost = CurrentCost(CostModel(_scaled(ops, scale), model.collectives), shared=self._cost.shared)
        self._set_links(layout, settling, of_links)


def explains(model: CostModel, layout: Layout, observed: Sequence[IterationObservations]) -> bool:
    """Whether each worker's ops scatter around the model's scaled predictions only as much as its own noise.

    They scatter more with another model, other kernels or another kind of schedule.
    """
    if model.ops.alpha.shape[1:] != observed[0].compute.shape[1:3]:
        return False
    expected = Expected(layout, observed, has_peers(layout), model)
    with np.errstate(divide="ignore", invalid="ignore"):
        residuals = np.log(padded([expected.own(each) / expected.predicted(each) for each in observed]))
    by_op = np.moveaxis(residuals, 0, -1).reshape(math.prod(residuals.shape[1:4]), -1)
    known = np.isfinite(by_op)
    deviation = np.abs(by_op - masked_median(by_op, known)[:, None])
    scatter = 1.4826 * masked_median(deviation.reshape(1, -1), known.reshape(1, -1))[0]
    return bool(scatter <= max(MISFIT * expected.op_noise, IRRELEVANT))


def stopped(observations: IterationObservations) -> NDArray[np.bool_]:
    """[workers] whether the worker's process is known to have been stopped beside its ops."""
    return np.nan_to_num(observations.spans[:, SpanKind.ABSENT]) > 0


def workload(observations: IterationObservations) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """N and Σ l², [workers, micro-batches]; 1 and 0 if none is known, so that a level can be fitted."""
    tokens, squares = observations.tokens, observations.squares
    if np.isfinite(tokens).any() and np.isfinite(squares).any():
        return tokens, squares
    return np.ones_like(tokens), np.zeros_like(squares)


def hidden_ops(observed: Sequence[IterationObservations], shared: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[workers, kinds, chunks]; see `Expected.hidden`."""
    waited = np.isfinite(stacked(observed, "waited")).any(axis=(0, 4))
    return waited & shared[:, None, None]


def _by_bytes(cost: LinkCost, size: float) -> LinkCost:
    """If all transfers have one size, treat the time as bandwidth, not latency, since tensors are large in training."""
    if cost.informative or not size > 0:
        return cost
    return replace(cost, latency=0.0, seconds_per_byte=cost.latency / size)


def _faster(cost: LinkCost, factor: float) -> LinkCost:
    return replace(cost, latency=cost.latency / factor, seconds_per_byte=cost.seconds_per_byte / factor)


def _select(fits: Fits, stages: NDArray[np.int64], chunks: NDArray[np.int64]) -> Fits:
    return Fits(**{name: getattr(fits, name)[stages][:, :, chunks] for name in fits.__dataclass_fields__})


def _scaled(fits: Fits, scale: NDArray[np.float64]) -> Fits:
    """The fits for ops that take `scale` times as long."""
    return replace(
        fits,
        alpha=fits.alpha * scale,
        beta=fits.beta * scale,
        gamma=fits.gamma * scale,
        information=fits.information / (scale**2)[..., None, None],
    )
