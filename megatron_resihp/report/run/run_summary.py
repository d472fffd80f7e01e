# SPDX-License-Identifier: Apache-2.0
"""The summary of a run, as data that goes to JSON and back.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from megatron_resihp.events.nonfinite import jsonable
from megatron_resihp.plan.batch_steps import Steps, consumed_after
from megatron_resihp.report.run.epochs import PlanInForce
from megatron_resihp.report.run.recoveries import Death, Recovery

REORDERED: Final = 1e-4
"""Bound of a loss's relative difference, in fp32 without dropout, with only one reference. Stock Megatron with another
data-parallel degree differs from itself by 4.3e-5 (lr 3e-3, 39 iterations, at a spike of the gradient).
"""
LEAST_BOUND: Final = 1e-5
"""The least bound from several references: a run with a third order may differ more than they do."""


@dataclass(frozen=True)
class Job:
    """The job that Megatron was asked to train."""

    global_batch_size: int
    train_iters: int
    first_iteration: int = 0
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    seq_length: int | None = None
    batch_steps: Steps = ()
    consumed_at_start: int | None = None
    """Samples that earlier runs had consumed, perhaps with other batch sizes; None: the log doesn't tell."""

    def samples_before(self, iteration: int) -> int:
        """How many samples all iterations before this one have; it is one of this run's, or the one that follows."""
        steps = self.batch_steps or ((0, self.global_batch_size),)
        if self.consumed_at_start is None:
            return consumed_after(steps, iteration - 1)
        return consumed_after(steps, iteration - 1 - self.first_iteration, self.consumed_at_start)


@dataclass(frozen=True)
class Workers:
    """The live workers of an epoch."""

    working: int
    standbys: int
    shape: str | None = None
    """Degrees of parallelism in words; None if workers of the plan have died since."""


@dataclass(frozen=True)
class Failure:
    """An error of a worker that is no communication failure."""

    worker: int
    error: str


@dataclass(frozen=True)
class Drill:
    action: str
    target: int | str
    iteration: int | None
    point: str | None


@dataclass(frozen=True)
class Finding:
    """A verdict of the detector; see the event `verdict`."""

    kind: str
    change: str
    workers: tuple[int, ...]
    speed: float
    since: int
    iteration: int
    speed_low: float | None = None
    speed_high: float | None = None


@dataclass(frozen=True)
class Detection:
    """The detector's counts; see the event `detection`."""

    iterations: int
    records: int
    faults: Mapping[str, float]
    warm: bool
    held_up_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stall:
    """A time without an iteration; see the event `stall`."""

    iteration: int
    seconds: float
    usual_s: float
    over: bool
    meanwhile: str | None = None


@dataclass(frozen=True)
class EmergencyCheckpoint:
    iteration: int
    path: str
    complete: bool
    missing: tuple[tuple[int, int], ...]
    """(stage, TP rank) of each shard that no survivor held."""


@dataclass(frozen=True)
class Standing:
    """The state of a run whose log has no end; see `standing`."""

    state: str
    """running, stalled, waiting for a coordinator, ended without a word, coordinator lost, or unknown."""
    silent_s: float
    """Since its last step or, before the first, since the last event."""


@dataclass(frozen=True)
class RunSummary:
    """A run, from its event log; the last run if the log holds several."""

    completed: bool
    exit_code: int | None = None
    """None: the log has no end; the run goes on, or its coordinator was killed."""
    reason: str | None = None
    started_at: float | None = None
    last_event_at: float | None = None
    iterations: int = 0
    """Last iteration that the workers agreed on."""
    job: Job | None = None
    workers_at_start: Workers | None = None
    workers_at_end: Workers | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    """The machine and GPU of each worker, by id."""
    deaths: tuple[Death, ...] = ()
    came_back: tuple[int, ...] = ()
    """Workers that were restarted and admitted."""
    joined: tuple[int, ...] = ()
    """Workers of nodes that were not there at the start, admitted for the first time."""
    recoveries: tuple[Recovery, ...] = ()
    plans: tuple[PlanInForce, ...] = ()
    """The plans that were in force, in their order."""
    loss_name: str | None = None
    loss: Mapping[int, float] = field(default_factory=dict)
    grad_norm: Mapping[int, float] = field(default_factory=dict)
    samples_per_second: Mapping[int, float] = field(default_factory=dict)
    skipped_iterations: tuple[int, ...] = ()
    samples_consumed: int | None = None
    """Applied samples, by the log. The three counts below are None where the log doesn't give all of them."""
    samples_applied_twice: int | None = None
    samples_lost: int | None = None
    samples_out_of_place: int | None = None
    drills: tuple[Drill, ...] = ()
    failures: tuple[Failure, ...] = ()
    salvages: tuple[EmergencyCheckpoint, ...] = ()
    verdicts: tuple[Finding, ...] = ()
    detection: Detection | None = None
    stalls: tuple[Stall, ...] = ()
    last_checkpoint: str | None = None
    last_checkpoint_iteration: int | None = None
    """Last step in it."""
    usual_iteration_s: float | None = None
    """Median of the latest iterations; None: there were too few."""
    last_step_at: float | None = None
    standing: Standing | None = None
    """The state of a run whose log has no end; None: the log has an end, or the state was not determined."""
    log_damaged: bool = False
    """The log has lost some of its contents, so the fate of samples is unknown."""
    events_missing: int = 0
    """Events that could not be written to the log, on a full disk perhaps."""
    iterations_not_in_log: tuple[int, ...] = ()
    """Iterations before the last one that are missing in the log."""
    loss_reference: Mapping[int, float] | None = None
    """The loss of the reference run, where one was given."""
    loss_max_relative_difference: float | None = None
    loss_bound: float = REORDERED
    """Bound of that difference: twice the largest difference among several references, or REORDERED."""
    compared_iterations: int | None = None
    """Iterations that this run and the reference have in common."""
    unreadable_lines: int = 0
    ignored_events: Mapping[str, int] = field(default_factory=dict)
    """Number of ignored events, by their fault."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dumps; iterations become strings and non-finite numbers are spelled out."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RunSummary:
        """The summary that `to_json` made `data` from."""
        return RunSummary(**{name: _decode(name, value) for name, value in data.items()})


def _decode(name: str, value: Any) -> Any:
    return value if value is None or name not in _DECODERS else _DECODERS[name](value)


def _each(decode: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda values: tuple(decode(value) for value in values)


def _by_iteration(values: Mapping[str, Any]) -> dict[int, float]:
    return {int(iteration): float(value) for iteration, value in values.items()}


def _recovery(value: Mapping[str, Any]) -> Recovery:
    return Recovery(**{**value, "dead": tuple(Death(**death) for death in value["dead"])})


def _emergency_checkpoint(value: Mapping[str, Any]) -> EmergencyCheckpoint:
    return EmergencyCheckpoint(**{**value, "missing": tuple((stage, rank) for stage, rank in value["missing"])})


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "job": lambda value: Job(**value | {"batch_steps": tuple(map(tuple, value.get("batch_steps", ())))}),
    "workers_at_start": lambda value: Workers(**value),
    "places": lambda value: {int(worker): place for worker, place in value.items()},
    "workers_at_end": lambda value: Workers(**value),
    "deaths": _each(lambda value: Death(**value)),
    "came_back": tuple,
    "joined": tuple,
    "standing": lambda value: Standing(**value),
    "iterations_not_in_log": tuple,
    "recoveries": _each(_recovery),
    "plans": _each(lambda value: PlanInForce(**value)),
    "loss": _by_iteration,
    "grad_norm": _by_iteration,
    "samples_per_second": _by_iteration,
    "skipped_iterations": tuple,
    "drills": _each(lambda value: Drill(**value)),
    "failures": _each(lambda value: Failure(**value)),
    "salvages": _each(_emergency_checkpoint),
    "verdicts": _each(lambda value: Finding(**{**value, "workers": tuple(value["workers"])})),
    "stalls": _each(lambda value: Stall(**value)),
    "detection": lambda value: Detection(**value),
    "loss_reference": _by_iteration,
    "loss_max_relative_difference": float,
    "loss_bound": float,
}
