"""A scenario: a job, what happens to its workers, and what changes cost.

Imports numpy, `cost` and this room's modules.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_resihp.cost.job import UNTIL_NEXT_EVENT_S
from megatron_resihp.simulator import published
from megatron_resihp.simulator.cluster import Clock, Delays, Judge
from megatron_resihp.simulator.sizes import Sizes
from megatron_resihp.simulator.traces import Trace


class ScenarioError(ValueError):
    """A scenario that can't be; the message is one line and names the place."""


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        name: of it.
        sizes: the job.
        traces: what happens, once for each random order.
        delays: what changes cost.
        squares: Σ l² of each micro-batch, tokens², in each of some iterations; none: each sample is one document.
        until_next_event_s: what strategies are told to expect.
        strategies: to compare; none: all.
    """

    name: str
    sizes: Sizes
    traces: tuple[Trace, ...]
    delays: Delays = field(default_factory=Delays)
    squares: tuple[tuple[float, ...], ...] = ()
    until_next_event_s: float = UNTIL_NEXT_EVENT_S
    strategies: tuple[str, ...] = ()

    def judge(self, clock: Clock = lambda: 0.0) -> Judge:
        typical = float(np.mean(self.squares)) if self.squares else None
        cost = replace(self.sizes.cost(), squares=typical, until_next_event_s=self.until_next_event_s)
        return Judge(cost, self.squares, clock)


# ---- published ones


def published_names() -> tuple[str, ...]:
    """What `published_scenario` knows."""
    hours = [f"{interval:g}h" for interval in published.facts()["fail_stop"]["interval_h"]]
    cases = {"fail-stop": hours, "fail-slow": published.SEVERITIES, "mixed": published.SEVERITIES}
    named = (f"{kind}/{model}/{case}" for kind, of in cases.items() for model in published.models() for case in of)
    large = (model for model in published.facts()["layouts"] if model not in published.models())
    return (*named, *(f"rejoins/{model}" for model in large))


def published_scenario(name: str, orders: int, micro_batches: int) -> Scenario:
    """A published experiment, such as fail-stop/llama2-13b/1h.

    Raises:
        ScenarioError: there is no such name.
    """
    if name not in published_names():
        raise ScenarioError(f"unknown scenario {name!r}; --list shows the published ones, or give a file")
    kind, model, *case = name.split("/")
    sizes = published.job(model, micro_batches)
    judge = published.judge_of(sizes)

    def draw(seed: int) -> Trace:
        if kind == "fail-stop":
            return published.fail_stop(sizes, float(case[0].removesuffix("h")), seed)
        if kind == "rejoins":
            return published.with_rejoins(sizes, seed)
        make = published.fail_slow if kind == "fail-slow" else published.mixed
        return make(sizes, judge, published.SEVERITIES.index(case[0]), seed)

    return Scenario(name, sizes, tuple(map(draw, range(orders))))
