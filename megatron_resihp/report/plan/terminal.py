# SPDX-License-Identifier: Apache-2.0
"""The plans before and after, and strategies' answers to a health, for a terminal.

May import: rich, `plan`, `planner` and this package's modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import memory_of
from megatron_resihp.plan import ParallelPlan, Replica
from megatron_resihp.planner.evaluation import Evaluation, run_of
from megatron_resihp.planner.health import Health
from megatron_resihp.report.plan.answer import SHARING, Answer, Situation
from megatron_resihp.report.words import NONE, count, duration, ranges, rate, size

MAX_ROWS = 24


def render(situation: Situation, answers: Mapping[str, Answer], shown: Answer, console: Console) -> None:
    """Print the situation, the chosen plan and, for several answers, their table."""
    console.print(Text(situation.title, style="bold"), soft_wrap=True)
    console.print(Text(f"  {_state(situation)}"), soft_wrap=True)
    console.print(Text(f"  costs: {situation.costs}"), soft_wrap=True)
    _plan(f"Before ({_rate(situation.healthy)} healthy, {_now(situation)})", situation.plan, situation, console)
    if shown.plan is None:
        console.print(f"\n[bold red]{shown.strategy}: no plan:[/bold red] {shown.reason}", soft_wrap=True)
    elif shown.plan == situation.plan:
        console.print(f"\n[bold]After, by {shown.strategy}: nothing to change[/bold]")
    else:
        title = f"After, by {shown.strategy} ({_rate(shown.evaluation)})"
        _plan(title, shown.plan, situation, console, shown.as_planned)
    console.print()
    console.print(_answers(situation, answers.values(), shown))
    for answer in answers.values():
        if answer.plan is None and answer is not shown:
            console.print(Text(f"  {answer.strategy}: {answer.reason}"), soft_wrap=True)
    if situation.left_out:
        console.print(Text(f"  no plans of jobs {SHARING}: {', '.join(situation.left_out)}"), soft_wrap=True)


def _state(situation: Situation) -> str:
    speed = situation.health.speed
    dead = sorted(set(situation.plan.members) - set(speed))
    slow = [f"{worker} at {p:g}" for worker, p in sorted(speed.items()) if p < 1]
    links = [f"{a}–{b} at {p:g}" for (a, b), p in sorted(situation.health.link.items())]
    said = [
        f"dead: {ranges(dead)}" if dead else "",
        f"slow: {', '.join(slow[:8])}{', …' if len(slow) > 8 else ''}" if slow else "",
        f"slow links: {', '.join(links[:8])}{', …' if len(links) > 8 else ''}" if links else "",
    ]
    return "; ".join(filter(None, said)) or "all workers are healthy"


def _rate(evaluation: Evaluation | None) -> str:
    return f"{rate(evaluation.samples_per_s if evaluation else None)} samples/s"


def _now(situation: Situation) -> str:
    unmitigated = situation.unmitigated
    return f"now {rate(unmitigated.samples_per_s)}" if unmitigated else "now stopped"


def _plan(
    title: str, plan: ParallelPlan, situation: Situation, console: Console, as_planned: bool = True
) -> None:  # fmt: skip
    console.print()
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("replica", "micro-batches", "stage", "layers", "TP", "workers", "speed", "ms each", "memory"):
        table.add_column(name, justify="left" if name in ("replica", "workers") else "right")
    rows = list(_rows(plan, situation.health, situation.cost, as_planned))
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"  {len(rows) - MAX_ROWS} more stages; --json has them all")
    if not as_planned:
        console.print(" experts are placed otherwise than plans can say: no job can run this plan")
    if plan.uneven_shards:
        console.print(" members of a stage hold unequal shards: no job can run this plan yet")
    if plan.standbys:
        console.print(f"  standby: {ranges(sorted(plan.standbys))}")
    if plan.migrations:
        moved = count(len(plan.migrations), "stage of a micro-batch", "stages of micro-batches")
        console.print(f"  run in another replica: {moved}")


def _rows(plan: ParallelPlan, health: Health, cost: JobCost, as_planned: bool) -> Iterable[Sequence[str]]:
    memory = memory_of(plan, cost.model, cost.training)
    for number, replica in enumerate(plan.replicas):
        each = _stage_times(plan, number, health, cost)
        for stage, members in enumerate(replica.stages):
            yield (
                str(number) if stage == 0 else "",
                str(len(replica.micro_batches)) if stage == 0 else "",
                str(stage),
                layers_of(replica, stage),
                str(len(members)),
                ranges(members),
                f"{min((health.speed.get(worker, 0.0) for worker in members), default=0.0):g}",
                f"{1000 * each[stage]:.1f}" if stage in each and as_planned else NONE,
                size(max((memory[worker].total for worker in members), default=0)) if as_planned else NONE,
            )


def _stage_times(plan: ParallelPlan, number: int, health: Health, cost: JobCost) -> dict[int, float]:
    """Seconds of a micro-batch's forward and backward by stage, without stages that have a dead member."""
    replica = plan.replicas[number]
    well = {worker: health.speed.get(worker, 1.0) for worker in plan.working}
    dead = {s for s, members in enumerate(replica.stages) if not members or not health.speed.keys() >= {*members}}
    if any(not members for members in replica.stages):
        return {}
    chunks = run_of(plan, number, Health(well), cost).seconds().sum(axis=0)
    totals: dict[int, float] = {}
    for chunk, seconds in zip(replica.chunks, chunks, strict=True):
        totals[chunk.stage] = totals.get(chunk.stage, 0.0) + float(seconds)
    return {stage: seconds for stage, seconds in totals.items() if stage not in dead}


def _answers(situation: Situation, answers: Iterable[Answer], shown: Answer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    for name in ("samples/s", "of healthy", "all well", "of bound", "idle", "to move", "moved in", "planned"):
        table.add_column(name, justify="right")
    for answer in sorted(answers, key=lambda a: -(a.evaluation.samples_per_s if a.evaluation else 0.0)):
        style = "bold" if answer is shown else ""
        if answer.plan is None or answer.evaluation is None:
            table.add_row(answer.strategy, "no plan", style=style)
            continue
        table.add_row(
            answer.strategy,
            rate(answer.evaluation.samples_per_s),
            f"{answer.evaluation.samples_per_s / situation.healthy.samples_per_s:.1%}",
            _share(answer.evaluation, answer.all_well),
            f"{answer.evaluation.share_of_bound:.1%}",
            str(len(situation.health.speed) - len(answer.plan.working)),
            size(round(answer.moving_bytes)),
            duration(answer.moving_s),
            duration(answer.planning_s),
            style=style,
        )
    return table


def _share(evaluation: Evaluation, of: Evaluation | None) -> str:
    return NONE if of is None else f"{evaluation.samples_per_s / of.samples_per_s:.1%}"


def layers_of(replica: Replica, stage: int) -> str:
    """How many layers a stage runs, "5+4" where it holds several chunks."""
    return "+".join(str(chunk.end - chunk.first) for chunk in replica.chunks if chunk.stage == stage)
