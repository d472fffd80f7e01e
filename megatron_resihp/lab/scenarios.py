# SPDX-License-Identifier: Apache-2.0
"""The published experiments by name, for `resihp simulate`. Imports `simulator` and this package's modules."""

from megatron_resihp.lab import published
from megatron_resihp.simulator.scenario import Scenario, ScenarioError
from megatron_resihp.simulator.traces import Trace


def names() -> tuple[str, ...]:
    """The names that `scenario` knows."""
    hours = [f"{interval:g}h" for interval in published.facts()["fail_stop"]["interval_h"]]
    cases = {"fail-stop": hours, "fail-slow": published.SEVERITIES, "mixed": published.SEVERITIES}
    named = (f"{kind}/{model}/{case}" for kind, of in cases.items() for model in published.models() for case in of)
    large = (model for model in published.facts()["layouts"] if model not in published.models())
    return (*named, *(f"rejoins/{model}" for model in large))


def scenario(name: str, orders: int, micro_batches: int) -> Scenario:
    """A published experiment, such as fail-stop/llama2-13b/1h.

    Raises:
        ScenarioError: the name is unknown.
    """
    if name not in names():
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
