# SPDX-License-Identifier: Apache-2.0
"""Reads JSON scenarios; `docs/planning.md` has the schema. Imports numpy, `cost` and the modules beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from megatron_resihp.config import MEMORY_RESERVE, ConfigError, check_reserve
from megatron_resihp.cost.model.layers import ModelError
from megatron_resihp.cost.model.presets import PRESETS, preset
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.simulator import traces
from megatron_resihp.simulator.cluster import Delays
from megatron_resihp.simulator.documents import Regime, draw_squares
from megatron_resihp.simulator.json_table import Table, TableError
from megatron_resihp.simulator.scenario import Scenario, ScenarioError
from megatron_resihp.simulator.sizes import GBPS, Sizes, SizesError, a100, sharers_of_experts
from megatron_resihp.simulator.traces import HOUR, Event, Trace, What

DRAWS: Final = 8
"""Iterations with different documents whose mean time sets a plan's speed."""
_NEVER: Final = float("inf")


def scenario_of(data: Any, orders: int | None = None) -> Scenario:
    """A scenario from a file's content.

    Args:
        data: the parsed JSON.
        orders: number of random orders, instead of the file's own number.

    Raises:
        ScenarioError: the data is no valid scenario.
    """
    try:
        return _scenario(Table(data, "the scenario"), orders)
    except (SizesError, ModelError) as error:
        raise ScenarioError(f"job: {error}") from None
    except TableError as error:
        raise ScenarioError(str(error)) from None


def _scenario(found: Table, orders: int | None) -> Scenario:
    sizes = _sizes(found.table("job", {}))
    sizes.plan()
    duration_s = found.number("hours", 24.0, above=0.0) * HOUR
    seed = int(found.number("seed", 0, least=0))
    drawn = orders or int(found.number("orders", 1, least=1))
    fixed = [_event(each, f"events[{i}]", sizes.workers) for i, each in enumerate(found.list("events"))]
    failures = [Table(each, f"failures[{number}]") for number, each in enumerate(found.list("failures"))]
    parts = [_Failures.of(each, sizes) for each in failures]

    def draw(order: int) -> Trace:
        random = (part.draw(duration_s, number, seed + order) for number, part in enumerate(parts))
        return traces.trace(duration_s, fixed, *random)

    scenario = Scenario(
        name=found.text("name", "scenario"),
        sizes=sizes,
        traces=tuple(map(draw, range(drawn))),
        delays=_delays(found.table("delays", {})),
        squares=_squares(found.table("documents", {}), sizes, seed),
        until_next_event_s=found.number("until_next_event_h", 1.0, above=0.0) * HOUR,
        strategies=tuple(map(str, found.list("strategies"))),
    )
    found.nothing_else()
    return scenario


def _sizes(job: Table) -> Sizes:
    name = job.text("model", "")
    training = Training(
        sequence_length=job.whole("seq_length", 4096),
        micro_batch_size=job.whole("micro_batch_size", 1),
        recompute=_recompute(job.text("recompute", "none")),
        sequence_parallel=job.flag("sequence_parallel"),
        distributed_optimizer=job.flag("distributed_optimizer"),
        expert_loads=_loads(job),
    )
    device = a100(
        flops=job.number("tflops", 312.0, above=0.0) * 1e12,
        efficiency=job.number("efficiency", 0.45, above=0.0),
        memory_gib=job.number("memory_gib", 80.0, above=0.0),
        reserve=_reserve(job),
        gbps=job.number("gbps", GBPS, above=0.0),
    )
    tensor, context = job.whole("tp", 1), job.whole("cp", 1)
    expert, expert_tensor = job.whole("ep", 1), job.whole("etp", tensor)
    data = context * job.whole("dp", 1)
    degrees = {"tensor": tensor, "pipeline": job.whole("pp", 1), "data": data, "context": context}
    micro_batches, per_node = job.whole("micro_batches", 64), job.whole("workers_per_node", 8)
    # Before missing keys are reported, as a key may be there but misspelt.
    job.nothing_else()
    if not name:
        raise ScenarioError(f"job: model is missing; known are {', '.join(PRESETS)}")
    experts, members = sharers_of_experts(expert, expert_tensor, tensor)
    return Sizes(
        model=preset(name), training=training, device=device, **degrees, micro_batches=micro_batches,
        workers_per_node=per_node, experts=experts, members=members,
    )  # fmt: skip


def _loads(job: Table) -> tuple[float, ...]:
    loads = job.list("expert_loads")
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < _NEVER for each in loads)
    if not numbers or (loads and not sum(loads)):
        raise ScenarioError("job.expert_loads must be finite numbers of at least 0, not all 0")
    return tuple(map(float, loads))


def _reserve(job: Table) -> float:
    percent = job.number("memory_reserve", MEMORY_RESERVE)
    try:
        check_reserve("memory_reserve", percent)
    except ConfigError as error:
        raise ScenarioError(str(error)) from None
    return percent


def _recompute(text: str) -> Recompute:
    try:
        return Recompute(text)
    except ValueError:
        raise ScenarioError(f"job.recompute is {text!r}; it is none, selective or full") from None


def _delays(given: Table) -> Delays:
    values: dict[str, Any] = {}
    for each in fields(Delays):
        if each.name in given.data:
            values[each.name] = None if given.take(each.name) is None else given.number(each.name, 0.0, least=0.0)
    given.nothing_else()
    return Delays(**values)


def _squares(given: Table, sizes: Sizes, seed: int) -> tuple[tuple[float, ...], ...]:
    """Σ l² of each micro-batch of some iterations, [iterations, micro-batches]."""
    if not given.data:
        return ()
    sequence, size = sizes.training.sequence_length, sizes.training.micro_batch_size
    share = given.number("long_share", 0.5, least=0.0)
    median = given.number("long_median_sequences", 2.0, above=0.0)
    draws = given.whole("draws", DRAWS)
    given.nothing_else()
    if share > 1:
        raise ScenarioError(f"documents.long_share is {share:g}; it must be from 0 to 1")
    regime = Regime(draws, share, median * sequence)
    found = draw_squares([regime], sizes.micro_batches * size, sequence, np.random.default_rng(seed))
    by_micro_batch = found.reshape(draws, sizes.micro_batches, size).sum(axis=2)
    return tuple(map(tuple, by_micro_batch.tolist()))


def _event(data: Any, place: str, workers: int) -> Event:
    given = Table(data, place)
    at_s = given.number("at_h", 0.0, least=0.0) * HOUR
    kinds = {"dead": What.DEATH, "back": What.REJOIN, "slow": What.SPEED, "link": What.LINK}
    named = [name for name in kinds if name in given.data]
    if len(named) != 1:
        raise ScenarioError(f"{place} needs exactly one of dead, back, slow and link")
    who = tuple(sorted(_worker(each, place, workers) for each in given.list(named[0])))
    speed = given.number("speed", None) if named[0] in ("slow", "link") else 1.0
    given.nothing_else()
    if not who:
        raise ScenarioError(f"{place}.{named[0]} names no worker")
    try:
        return Event(at_s, kinds[named[0]], who, speed)
    except ValueError as error:
        raise ScenarioError(f"{place}: {error}") from None


def _worker(value: Any, place: str, workers: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < workers:
        raise ScenarioError(f"{place} names worker {value!r}; the job has workers 0 to {workers - 1}")
    return value


@dataclass(frozen=True)
class _Failures:
    """A random process of failures.

    Attributes:
        what: one of WHAT.
        units: the workers or links that it may strike.
        gaps, lasting: time between its events, and how long each lasts.
        speeds: range of speeds.
    """

    what: str
    units: Sequence[tuple[int, ...]]
    gaps: traces.Gaps
    lasting: traces.Gaps
    speeds: tuple[float, float]

    WHAT = ("deaths", "node-losses", "slow-downs", "slow-links")

    @classmethod
    def of(cls, given: Table, sizes: Sizes) -> "_Failures":
        what = given.text("what", "")
        if what not in cls.WHAT:
            raise ScenarioError(f"{given.place}.what is {what!r}; it is one of {', '.join(cls.WHAT)}")
        units = {
            "node-losses": lambda: traces.nodes(sizes.workers, sizes.workers_per_node),
            "slow-links": lambda: _links(sizes),
        }.get(what, lambda: traces.single(sizes.workers))()
        usual_s = {"slow-downs": traces.COMPUTE_SLOW_S, "slow-links": traces.LINK_SLOW_S}.get(what, _NEVER)
        lasting_s = given.number("lasting_h", usual_s / HOUR, above=0.0, most=_NEVER) * HOUR
        lasting = traces.every(_NEVER) if lasting_s == _NEVER else traces.poisson(lasting_s)
        found = cls(what, units, _gaps(given), lasting, _range(given))
        given.nothing_else()
        return found

    def draw(self, duration_s: float, number: int, seed: int) -> list[Event]:
        rng = np.random.default_rng([seed, number])
        times = traces.moments(self.gaps, duration_s, rng)
        if self.what in ("deaths", "node-losses"):
            return traces.outages(times, self.units, self.lasting, rng)
        kind = What.LINK if self.what == "slow-links" else What.SPEED
        return traces.slow_downs(times, self.units, self.lasting, rng, kind, self.speeds)


def _gaps(given: Table) -> traces.Gaps:
    names = [name for name in ("every_h", "poisson_h", "weibull_h") if name in given.data]
    if len(names) != 1:
        raise ScenarioError(f"{given.place} needs exactly one of every_h, poisson_h and weibull_h")
    seconds = given.number(names[0], 1.0, above=0.0) * HOUR
    if names[0] == "weibull_h":
        return traces.weibull(seconds, given.number("shape", 0.7, above=0.0))
    return traces.every(seconds) if names[0] == "every_h" else traces.poisson(seconds)


def _range(given: Table) -> tuple[float, float]:
    speeds = given.list("speed") or list(traces.SLOW_SPEEDS)
    numbers = all(isinstance(each, int | float) for each in speeds)
    if len(speeds) != 2 or not numbers or not 0 < speeds[0] <= speeds[1] <= 1:
        raise ScenarioError(f"{given.place}.speed is {speeds}; it is [lowest, highest], above 0 and at most 1")
    return float(speeds[0]), float(speeds[1])


def _links(sizes: Sizes) -> list[tuple[int, ...]]:
    """The links between stages of the layout at the start; links without traffic are left out."""
    found = set()
    for replica in sizes.plan().replicas:
        for senders, receivers in zip(replica.stages, replica.stages[1:], strict=False):
            found |= {(min(pair), max(pair)) for pair in zip(senders, receivers, strict=True)}
    if not found:
        raise ScenarioError("slow-links: a job without pipeline stages has no links to slow")
    return sorted(found)
