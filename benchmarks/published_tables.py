# SPDX-License-Identifier: Apache-2.0
"""Published and simulated numbers side by side, as text. Imports `megatron_resihp.lab.published`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_resihp.lab import published

Row = Mapping[str, Any]
COLUMN = 11
PLACES = ("node", "tp", "pp", "dp")

PAPER = "resihp-paper"
"""The strategy that implements the published tables' resihp."""


def print_tables(cells: Sequence[Row], idle: Mapping[str, Any], steps: Mapping[str, Any]) -> None:
    """All experiments, one after another, for each number of micro-batches.

    Args:
        cells: of all experiments but the amplification.
        idle: of that one, by number of micro-batches, strategy and place.
        steps: samples/s of ResiHP without some of its steps, by number of micro-batches and experiment.
    """
    for micro_batches, by_strategy in idle.items():
        chosen = [cell for cell in cells if cell["micro_batches"] == int(micro_batches)]
        print(f"\n==== {micro_batches} micro-batches ====")
        for table in (fail_stop, fail_slow, mixed, at_256, shares):
            lines = list(table(chosen))
            if lines:
                print("\n".join(["", *lines]))
        print("\n".join(["", *amplification(by_strategy), "", *ablation(steps[micro_batches])]))


def fail_stop(cells: Sequence[Row]) -> Iterator[str]:
    """Samples/s, published → simulated, for the systems of the published table; `joint` beside them."""
    rows = [cell for cell in cells if cell["experiment"] == "fail-stop"]
    if not rows:
        return
    facts = published.facts()["fail_stop"]
    names = ("oobleck", "recycle", "resihp")
    yield "Fail-stop, samples/s, published → simulated (– : aborted)"
    yield _line("model", "interval", *(f"{name:>22}" for name in names), "difference", "joint", "joint free")
    for cell in rows:
        table = facts["samples_per_s"][cell["model"]]
        place = [f"{hours:g} h" for hours in facts["interval_h"]].index(cell["case"])
        pairs = [(table[name][place], simulated(cell, PAPER if name == "resihp" else name)) for name in names]
        yield _line(
            cell["model"], cell["case"], *(f"{_number(old):>10} → {_number(new):>9}" for old, new in pairs),
            difference(*pairs[-1]), _number(simulated(cell, "joint")), _number(simulated(cell, "joint (free)")),
        )  # fmt: skip
    yield _line("", "fault-free: calibrated, so equal by construction")


def fail_slow(cells: Sequence[Row]) -> Iterator[str]:
    """Speed-up over the unmitigated job."""
    rows = [cell for cell in cells if cell["experiment"] == "fail-slow"]
    if not rows:
        return
    facts = published.facts()["fail_slow"]
    yield "Fail-slow, speed-up over the unmitigated job, published → simulated"
    yield _line("model", "severity", f"{'resihp':>22}", "difference", "joint", "greyhound", "adaptra", "largest")
    for cell in rows:
        place = published.SEVERITIES.index(cell["case"])
        old, new = facts["resihp"][cell["model"]][place], over(cell, PAPER, "unmitigated")
        others = (over(cell, name, "unmitigated") for name in ("joint", "greyhound", "adaptra"))
        largest = 1 / (1 - facts["unmitigated_drop"][place])
        yield _line(
            cell["model"], cell["case"], f"{_number(old):>10} → {_number(new):>9}", difference(old, new),
            *map(_number, others), _number(largest),
        )  # fmt: skip
    yield "  largest: what the drop leaves to gain, if the fault-free speed is reached again"
    for name in ("adaptra", "greyhound"):
        yield f"  resihp over {name}: {_range(facts[f'over_{name}'])} → {_range_of(rows, PAPER, name)}"


def mixed(cells: Sequence[Row]) -> Iterator[str]:
    """Ranges of the speed-ups."""
    rows = [cell for cell in cells if cell["experiment"] == "mixed"]
    if rows:
        yield "Mixed failures, resihp over others, range over models and severities, published → simulated"
        facts = published.facts()["mixed"]
        for key, name in (("over_recycle", "recycle"), ("over_recycle_plus_greyhound", "recycle+greyhound"),
                          ("over_oobleck_plus_greyhound", "oobleck+greyhound")):  # fmt: skip
            yield f"  over {name}: {_range(facts[key])} → {_range_of(rows, PAPER, name)}"


def at_256(cells: Sequence[Row]) -> Iterator[str]:
    """Speed-ups on 256 GPUs."""
    rows = [cell for cell in cells if cell["experiment"] == "256 GPUs"]
    if rows:
        yield "256 GPUs with rejoins, resihp over others, published → simulated (each model)"
        facts = published.facts()["at_256_gpus"]
        for key, name in (("over_recycle_plus_greyhound", "recycle+greyhound"),
                          ("over_oobleck_plus_greyhound", "oobleck+greyhound")):  # fmt: skip
            found = ", ".join(f"{cell['model']} {_number(over(cell, PAPER, name))}" for cell in rows)
            yield f"  over {name}: {facts[key]} → {found}"


def amplification(by_strategy: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Idle GPU time, as shares of what one slow GPU costs the published job unmitigated: the text gives no unit."""
    facts = published.facts()["amplification"]
    whole = sum(facts["before"].values())
    yield f"Amplification ({facts['setup']}): idle GPU time by place, in % of the unmitigated total"
    yield _line("", *PLACES, "together")
    yield _line("published", *_percent(facts["before"], whole))
    yield _line("  mitigated", *_percent(facts["after"], whole))
    whole = sum(by_strategy["unmitigated"].values())
    for name, found in by_strategy.items():
        yield _line("simulated" if name == "unmitigated" else f"  {name}", *_percent(found, whole))


def ablation(by_experiment: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The gain from each of ResiHP's steps."""
    yield "Ablation of ResiHP, llama2-13b, samples/s; no published numbers are at hand"
    yield _line("", *next(iter(by_experiment.values())))
    for name, rates in by_experiment.items():
        yield _line(name, *(f"{rate:.2f}" for rate in rates.values()))


def _percent(found: Mapping[str, float], whole: float) -> Iterator[str]:
    yield from (f"{found.get(place, 0.0) / whole:.1%}" for place in PLACES)
    yield f"{sum(found.values()) / whole:.1%}"


def shares(cells: Sequence[Row]) -> Iterator[str]:
    """Share of the capacity that every strategy reaches."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["strategies"]))
    yield "Share of capacity: mean, worst cell; cells aborted in some order"
    for name in names:
        rows = [cell["strategies"][name] for cell in cells if name in cell["strategies"]]
        values = [row["share"] for row in rows]
        aborted = sum(any(row["aborted"]) for row in rows)
        yield f"  {name:<20} {statistics.fmean(values):7.1%} {min(values):7.1%} {aborted:4d} of {len(rows)}"


def simulated(cell: Row, name: str) -> float | None:
    """Mean throughput; None if there is none, or the job aborted in most orders."""
    row = cell["strategies"].get(name)
    if row is None or sum(row["aborted"]) * 2 > len(row["aborted"]):
        return None
    return float(row["samples_per_s"])


def over(cell: Row, ours: str, other: str) -> float | None:
    """Ratio of mean throughputs."""
    rows = cell["strategies"]
    if ours not in rows or other not in rows or rows[other]["samples_per_s"] <= 0:
        return None
    return float(rows[ours]["samples_per_s"] / rows[other]["samples_per_s"])


def difference(old: float | None, new: float | None) -> str:
    """The deviation of the simulated from the published value."""
    return "–" if old is None or new is None else f"{new / old - 1:+.1%}"


def _range_of(rows: Sequence[Row], ours: str, other: str) -> str:
    found = [value for row in rows if (value := over(row, ours, other)) is not None]
    return _range([min(found), max(found)]) if found else "–"


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _line(*cells: str) -> str:
    return f"{cells[0]:<18}" + "".join(f"{text:>{COLUMN}}" for text in cells[1:])
