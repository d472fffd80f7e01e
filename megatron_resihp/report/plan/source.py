# SPDX-License-Identifier: Apache-2.0
"""A job to plan for, from flags or from a run directory: the plan in force, the workers, and the costs of work.

May import: the standard library, `plan`, `cost`, `simulator`, `control.replanning.job_facts` and modules of this
package.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatron_resihp.config import MEMORY_RESERVE, ConfigError, check_reserve
from megatron_resihp.control.replanning.job_facts import JobFacts
from megatron_resihp.cost.device import Device
from megatron_resihp.cost.fitted.store import FILE_NAME as COST_MODEL_NAME
from megatron_resihp.cost.fitted.store import CostModelError, load
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import with_layers
from megatron_resihp.cost.model.layers import Model, ModelError, model_from_arguments
from megatron_resihp.cost.model.presets import preset
from megatron_resihp.cost.running import UnknownCost, cost_of_job
from megatron_resihp.cost.training import Recompute, Training, TrainingError, training_from_arguments
from megatron_resihp.events.epochs import EpochStarted
from megatron_resihp.events.event import Event
from megatron_resihp.events.job import BatchGrown, Job, RunStarted
from megatron_resihp.events.job import Model as ModelTold
from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.plan import Chunk, ParallelPlan, PlanError
from megatron_resihp.protocol.planning import KnownJob
from megatron_resihp.report.plan.flags import SIZES
from megatron_resihp.simulator.sizes import NoRoomError, Sizes, SizesError, a100, sharers_of_experts

_SHARING: Final = ("context_parallel_size", "expert_model_parallel_size")
_NEGATED: Final = {"disable_bias_linear": "add_bias_linear"}
"""Megatron's flags that switch off an argument with another name."""
_LEAST, _MOST = 1e-6, 1e9
"""Bounds of TFLOP/s, Gb/s, GiB and hours: far beyond any device, but without overflow in the arithmetic."""
_MOST_OF: Final = {
    "gpus": 1_000_000,
    "tp": 1_000_000,
    "pp": 1_000_000,
    "cp": 1_000_000,
    "ep": 1_000_000,
    "etp": 1_000_000,
    "dp": 1_000_000,
    "micro_batches": 1_000_000,
    "micro_batch_size": 1_000_000,
    "seq_length": 1_000_000_000,
    "workers_per_node": 1_000,
}
"""Upper bounds of whole numbers, so that a typing error doesn't fill the memory."""


class SourceError(ValueError):
    """The arguments describe no job; the message is one line."""


@dataclass(frozen=True)
class Source:
    """A job.

    Attributes:
        title: in words.
        plan: the one in force, with its layers.
        cost: the costs of its work.
        costs: the source of these costs, in words.
        places: of a run's workers; None: each worker's id is its place.
    """

    title: str
    plan: ParallelPlan
    cost: JobCost
    costs: str
    places: int | None = None


def source_of(namespace: argparse.Namespace) -> Source:
    """The job that the arguments name.

    Raises:
        SourceError: there is no such job.
    """
    try:
        _check_numbers(namespace)
    except ConfigError as error:
        raise SourceError(str(error)) from None
    given = [name for name in SIZES if getattr(namespace, name) is not None]
    try:
        if namespace.run_dir is None:
            usual = {name: SIZES[name] for name in SIZES.keys() - given}
            return _expecting(namespace, _with_room(argparse.Namespace(**(vars(namespace) | usual))))
        if given:
            raise SourceError(f"{_flag(given[0])} and RUN_DIR both give the job's sizes; leave out one of them")
        return _expecting(namespace, _of_run(namespace.run_dir, namespace))
    except (ModelError, TrainingError, SizesError, PlanError) as error:
        raise SourceError(str(error)) from None


def _expecting(namespace: argparse.Namespace, source: Source) -> Source:
    return replace(source, cost=replace(source.cost, until_next_event_s=3600 * namespace.until_next_event))


def _check_numbers(namespace: argparse.Namespace) -> None:
    for name in ("memory_gib", "tflops", "gbps", "until_next_event"):
        value = getattr(namespace, name)
        if not _LEAST <= value <= _MOST:
            raise SourceError(f"{_flag(name)} must be above 0, from {_LEAST:g} to {_MOST:g}, got {value:g}")
    if namespace.memory_reserve is not None:
        check_reserve("--memory-reserve", namespace.memory_reserve)
    for name, most in _MOST_OF.items():
        value = getattr(namespace, name)
        if value is not None and not 1 <= value <= most:
            raise SourceError(f"{_flag(name)} must be at least 1 and at most {most:,}, got {value}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_room(namespace: argparse.Namespace) -> Source:
    try:
        return _of_flags(namespace)
    except NoRoomError as error:
        mend = "give more GPUs, --distributed-optimizer, --recompute or --memory-gib"
        raise SourceError(f"{error}; {mend}") from None


def _of_flags(namespace: argparse.Namespace) -> Source:
    if namespace.model is None:
        raise SourceError("--model is missing; give it with --gpus, --tp and --pp, or give a run directory")
    model = preset(namespace.model)
    training = Training(
        sequence_length=namespace.seq_length,
        micro_batch_size=namespace.micro_batch_size,
        recompute=Recompute(namespace.recompute),
        sequence_parallel=namespace.sequence_parallel,
        distributed_optimizer=namespace.distributed_optimizer,
    )
    experts, members = sharers_of_experts(namespace.ep, namespace.etp, namespace.tp)
    sizes = Sizes(
        model=model,
        training=training,
        device=_device(namespace),
        tensor=namespace.tp,
        pipeline=namespace.pp,
        data=_replicas(namespace),
        micro_batches=namespace.micro_batches,
        workers_per_node=namespace.workers_per_node or 8,
        context=namespace.cp,
        experts=experts,
        members=members,
    )
    return Source(f"{namespace.model}, {sizes.title}", sizes.plan(), sizes.cost(), _from_flops(namespace))


def _from_flops(namespace: argparse.Namespace) -> str:
    return f"from FLOPs and a device of {namespace.tflops:g} TFLOP/s, so ratios say more than seconds"


def _replicas(namespace: argparse.Namespace) -> int:
    """How many there are, among them those that share sequences."""
    size = namespace.tp * namespace.cp * namespace.pp
    if namespace.gpus is None:
        return int(namespace.cp * (namespace.dp or 1))
    replicas = namespace.gpus // size
    layout = f"TP {namespace.tp} × {f'CP {namespace.cp} × ' if namespace.cp > 1 else ''}PP {namespace.pp}"
    if replicas < 1:
        raise SourceError(f"{namespace.gpus} GPUs are too few for one replica of {layout}")
    if namespace.gpus != size * (namespace.dp or replicas):
        wrong = f"not {layout} × DP {namespace.dp}" if namespace.dp else f"not a multiple of {layout}"
        raise SourceError(f"{namespace.gpus} GPUs are {wrong}")
    return int(namespace.cp * (namespace.dp or replicas))


def _device(namespace: argparse.Namespace) -> Device:
    return a100(
        flops=namespace.tflops * 1e12, memory_gib=namespace.memory_gib, gbps=namespace.gbps,
        reserve=MEMORY_RESERVE if namespace.memory_reserve is None else namespace.memory_reserve,
    )  # fmt: skip


# ---- a run directory


def _of_run(run_dir: Path, namespace: argparse.Namespace) -> Source:
    path = run_dir / FILE_NAME
    try:
        log = read_events(path)
    except OSError:
        lacking = f"has no {FILE_NAME}" if run_dir.exists() else "does not exist"
        raise SourceError(f"{run_dir} {lacking}; give the run directory of a started run") from None
    found = log.events
    started, epoch = _last(found, RunStarted), _last(found, EpochStarted)
    if started is None or epoch is None or not (started.command and started.nproc_per_node and started.most_nodes):
        unusable = f" ({', '.join(log.ignored)})" if log.ignored else ""
        raise SourceError(
            f"{path} says neither the job's flags nor its plan{unusable}; give the directory of a run that trained"
        )
    arguments = megatron_arguments(started.command)
    model = _model(arguments, path)
    plan = _plan(epoch.plan, model, path)
    job, own = _told(found, namespace)
    if (job is None or not job.shares) and any((arguments.get(name) or 1) > 1 for name in _SHARING):
        raise SourceError(f"{path} doesn't say how replicas share; give the directory of a run that trained")
    per_node = namespace.workers_per_node or started.nproc_per_node
    places = started.most_nodes * started.nproc_per_node
    costs = _from_flops(namespace)
    if job is not None and (measured := _measured(run_dir, job, own, places, per_node)) is not None:
        cost, costs = measured
    elif job is not None and job.shares:
        cost = _of_sharers(job, own, places, per_node, namespace)
    else:
        cost = JobCost(
            model=model,
            training=training_from_arguments(arguments),
            device=_device(namespace),
            micro_batches=plan.micro_batch_count,
            workers_per_node=per_node,
        )
    title = f"{run_dir}, epoch {epoch.epoch}, {len(plan.members)} live workers"
    return Source(title, plan, cost, costs, places)


def _told(found: Sequence[Event], namespace: argparse.Namespace) -> tuple[KnownJob | None, tuple[Chunk, ...]]:
    """What workers have told of the job, and its own split into layers; None: nothing."""
    told, model = _last(found, Job), _last(found, ModelTold)
    if told is None or model is None or told.chunks is None:
        return None, ()
    if told.tensor_parallel is None or told.micro_batches is None:
        return None, ()
    facts = JobFacts()
    for event in (told, _last(found, BatchGrown), model):
        if event is not None:
            facts.note(event)
    job, own = facts.known()
    memory = job.device_memory or int(namespace.memory_gib * 2**30)
    reserve = job.memory_reserve if namespace.memory_reserve is None else namespace.memory_reserve
    return replace(job, device_memory=memory, memory_reserve=reserve), own


def _measured(
    run_dir: Path, job: KnownJob, own: tuple[Chunk, ...], places: int, per_node: int
) -> tuple[JobCost, str] | None:
    """The run's costs, as for its own planner, and their source in words; None: nothing was measured."""
    if job.emulated:
        with suppress(UnknownCost):
            return cost_of_job(job, places, per_node, own, None), f"of the emulated device {job.emulated}"
    path = run_dir / COST_MODEL_NAME
    try:
        cost = cost_of_job(replace(job, emulated=None), places, per_node, own, load(path))
    except (UnknownCost, CostModelError):
        return None
    return (cost, f"as the run has measured them, from {path}") if cost.alone is not None else None


def _of_sharers(
    job: KnownJob, own: tuple[Chunk, ...], places: int, per_node: int, namespace: argparse.Namespace
) -> JobCost:
    try:
        cost = cost_of_job(replace(job, emulated=None), places, per_node, own, None)
    except UnknownCost as error:
        raise SourceError(str(error)) from None
    return replace(cost, device=_device(namespace))


def _model(arguments: Mapping[str, Any], path: Path) -> Model:
    try:
        return model_from_arguments(arguments)
    except ModelError as error:
        raise SourceError(f"{path}: the job's flags don't give the model's sizes: {error}") from None


def _plan(data: Any, model: Model, path: Path) -> ParallelPlan:
    try:
        plan = ParallelPlan.from_dict(data)
        return replace(plan, replicas=tuple(with_layers(replica, model) for replica in plan.replicas))
    except PlanError as error:
        raise SourceError(f"{path}: the last plan can't be used: {error}; give the directory of another run") from None


def _last[E: Event](found: Sequence[Event], kind: type[E]) -> E | None:
    return next((event for event in reversed(found) if isinstance(event, kind)), None)


def megatron_arguments(command: Sequence[str]) -> dict[str, Any]:
    """A command line's flags as Megatron's arguments: "--num-layers 4 --bf16" → {"num_layers": 4, "bf16": True}."""
    arguments: dict[str, Any] = {}
    values: list[str] = []
    name = ""
    for text in [*command, "--"]:
        if text.startswith("--"):
            if name:
                arguments[name] = [*map(_plain, values)] if len(values) > 1 else _plain(values[0]) if values else True
            flag, _, value = text[2:].partition("=")
            name, values = flag.replace("-", "_"), [value] if value else []
        else:
            values.append(text)
    for off, on in _NEGATED.items():
        if arguments.pop(off, False):
            arguments[on] = False
    return arguments


def _plain(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
