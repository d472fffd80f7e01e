# SPDX-License-Identifier: Apache-2.0
"""The --resihp* flags: one dataclass is the source for argparse, the documentation and JSON. Imports nothing."""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

INJECTION_POINTS = (
    "forward", "backward", "p2p", "grad-sync", "norm", "step", "gather", "between", "evaluate", "save",
    "recovery-report", "recovery-rebuild", "recovery-migrate", "recovery-ready",
    "dispatch", "combine", "combine-backward", "dispatch-backward", "context", "context-backward",
)  # fmt: skip

UNIFORM: Final = "uniform"
JOINT: Final = "joint"
STRATEGIES: Final = (
    UNIFORM,
    "drop-replica",
    "recycle",
    "oobleck",
    "greyhound",
    "adaptra",
    "recycle+greyhound",
    "oobleck+greyhound",
    "resihp-paper",
    "malleus",
    "adaptis",
    JOINT,
)
"""Strategies that can plan in place."""
OBSERVE, ASK, ACT = "observe", "ask", "act"
ACTS: Final = (OBSERVE, ASK, ACT)

HOST: Final = "host"
DEVICE: Final = "device"
CARRIERS: Final = (HOST, DEVICE)
"""What carries gradients and results between workers under a heterogeneous plan."""

MOST_PLAN_WAIT_S: Final = 3600.0
PLAN_WAIT_S: Final = 2.0
"""Default time that a recovery waits for a strategy's plan where complete uniform replicas exist."""

MEMORY_RESERVE: Final = 8.0
"""Default percentage of each device's memory that plans leave free."""

FALSE_ALARMS_PER_JOB: Final = 0.01
"""Default number of false reports of a slow worker or link that are accepted in a job."""

SLOWEST: Final = 0.01
"""The smallest factor of a slowdown."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """For an unknown name: "do you mean NEAREST? ", or an empty string where no known name is near."""
    near = get_close_matches(name, list(known), 1)
    return f"do you mean {near[0]}? " if near else ""


class ConfigError(ValueError):
    """An invalid flag; the message is one line with the cause and the remedy."""


@dataclass(frozen=True)
class Injection:
    """A failure to stage when `worker` reaches `point` in `iteration` (1-based).

    Actions: kill (SIGKILL), stop (SIGSTOP), rebuild (the worker reports a communication error, no worker is lost).
    """

    action: str
    worker: int
    iteration: int
    point: str = "forward"

    PATTERN = re.compile(r"(kill|stop|rebuild):(\d+)@([1-9]\d*)(?::([a-z0-9-]+))?")

    @classmethod
    def parse(cls, text: str) -> "Injection":
        """Read ACTION:WORKER@ITERATION[:POINT].

        Raises:
            ConfigError: if it is not of that form.
        """
        match = cls.PATTERN.fullmatch(text)
        if not match:
            form = "ACTION:WORKER@ITERATION[:POINT], e.g. kill:3@10:backward"
            others = "slow:WORKER:SPEED@ITERATION, link:A-B:FACTOR@ITERATION or clear@ITERATION"
            raise ConfigError(f"--resihp-inject {text!r} is not {form}, nor {others}")
        action, worker, iteration, point = match.groups()
        if point is not None and point not in INJECTION_POINTS:
            raise ConfigError(
                f"--resihp-inject {text!r}: no point {point!r}; choose from {', '.join(INJECTION_POINTS)}"
            )
        return cls(action, int(worker), int(iteration), point or "forward")


@dataclass(frozen=True)
class Slowdown:
    """A worker or link that becomes slower, or all slowed workers and links that become healthy again.

    Attributes:
        workers: one worker, the two ends of a link, or none: everything is healthy again.
        factor: speed of the worker or bandwidth of the link in (0, 1], relative to its healthy value.
        iteration: when (1-based); None: at once.

    Raises:
        ConfigError: a value is invalid.
    """

    workers: tuple[int, ...] = ()
    factor: float = 1.0
    iteration: int | None = None

    PATTERN = re.compile(r"(?:slow:(\d+):([^@:]+)|link:(\d+)-(\d+):([^@:]+)|clear)@([1-9]\d*)")

    def __post_init__(self) -> None:
        if not SLOWEST <= self.factor <= 1.0:  # not NaN either
            raise ConfigError(f"{self.factor:g} is not a speed; give one from {SLOWEST:g} to 1, the healthy speed")
        if len(self.workers) == 2 and self.workers[0] == self.workers[1]:
            raise ConfigError(f"a link joins two workers, not worker {self.workers[0]} with itself")

    @classmethod
    def parse(cls, text: str) -> "Slowdown | None":
        """Read slow:WORKER:SPEED@ITERATION, link:A-B:FACTOR@ITERATION or clear@ITERATION.

        Returns None for anything else.

        Raises:
            ConfigError: if it has that form but its values are invalid.
        """
        match = cls.PATTERN.fullmatch(text)
        if not match:
            return None
        worker, speed, one, other, factor, iteration = match.groups()
        workers = tuple(int(each) for each in (worker, one, other) if each is not None)
        try:
            return cls(workers, factor_of(speed or factor or "1"), int(iteration))
        except ConfigError as error:
            raise ConfigError(f"--resihp-inject {text!r}: {error}") from error

    def __str__(self) -> str:
        if not self.workers:
            return "all workers and links are at full speed"
        name = f"worker {self.workers[0]}" if len(self.workers) == 1 else "link {}-{}".format(*self.workers)
        return f"{name} is at {f'{self.factor:g} of its speed' if self.factor < 1.0 else 'full speed'}"


AUTO: Final = "auto"
"""Value of --resihp-plan that stands for the planner's own plan."""


@dataclass(frozen=True)
class ScheduledPlan:
    """A plan to ask for when an iteration (1-based) begins."""

    path: Path
    iteration: int

    PATTERN = re.compile(r"(.+?)(?:@([1-9]\d*))?")

    @classmethod
    def parse(cls, text: str) -> "ScheduledPlan":
        """Read FILE[@ITERATION].

        Raises:
            ConfigError: it is not of that form.
        """
        match = cls.PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(f"--resihp-plan {text!r} is not FILE[@ITERATION], e.g. plan.json@10")
        path, iteration = match.groups()
        return cls(Path(path), int(iteration or 1))


def factor_of(text: str) -> float:
    """Read a number.

    Raises:
        ConfigError: if the text is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number; give one from {SLOWEST:g} to 1") from None


def check_false_alarms(flag: str, rate: float) -> None:
    """Raises: ConfigError: the rate given with `flag` is invalid."""
    if not 0 < rate <= 1:  # not NaN either
        raise ConfigError(f"{flag} {rate:g} is invalid; give more than 0 and at most 1")


def check_reserve(flag: str, percent: float) -> None:
    """Raises: ConfigError: the percentage given with `flag` is invalid."""
    if not 0 <= percent < 100:  # not NaN either
        raise ConfigError(f"{flag} {percent:g} is invalid; give a percentage from 0 to less than 100")


def _flag(default: Any, help_text: str, **options: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **options})


@dataclass(frozen=True)
class ResihpConfig:
    """What a user can set; each field is a flag of the same name in Megatron's own --help."""

    resihp: bool = _flag(False, "Keep the job running in place when workers die. Start it with `resihp launch`.")
    resihp_inject: Sequence[str] = _flag(
        (), "Fault injection: ACTION:WORKER@ITERATION[:POINT] with ACTION kill, stop or rebuild and POINT one of "
        + ", ".join(INJECTION_POINTS) + " (default forward); slow:WORKER:SPEED@ITERATION, "
        "link:A-B:FACTOR@ITERATION, clear@ITERATION; or @FILE, a JSON list of such.",
        nargs="+", metavar="FAULT",
    )  # fmt: skip
    resihp_plan: Sequence[str] = _flag(
        (), "Plans to change to while training: FILE[@ITERATION], the JSON of `resihp plan --json`, requested when the "
        "iteration begins (default: the first) and applied after one of the next; or auto, the planner's own for this "
        "model with all workers healthy, as soon as it is found.",
        nargs="+", metavar="PLAN",
    )  # fmt: skip
    resihp_record_samples: bool = _flag(
        False, "Write the indices of the samples really fed to the model to the event log, iteration by iteration."
    )
    resihp_record_digests: bool = _flag(
        False, "Write a digest of every worker's parameters and optimizer state to the event log at the end."
    )
    resihp_answer_timeout: float = _flag(
        1800.0,
        "How long a worker with a communication error waits for a suspended coordinator before it gives the "
        "coordinator up for lost.",
        metavar="SECONDS",
    )  # fmt: skip
    resihp_emulate: str | None = _flag(
        None, "Let CPU workers take as long as an emulated device would: a profile's JSON file, or h800 or a100.",
        metavar="PROFILE",
    )  # fmt: skip

    resihp_false_alarms_per_job: float = _flag(
        FALSE_ALARMS_PER_JOB, "How many false reports of a slow worker or link you accept in a whole job, on "
        "average: more than 0, at most 1.", metavar="N",
    )  # fmt: skip

    resihp_spread_replicas: bool = _flag(
        False, "Lay workers out so that no shard of the model or of its optimizer lives on one node only, where they "
        "can be: the job then survives the loss of a node. It changes which traffic crosses nodes; `resihp check` "
        "shows how much.",
    )  # fmt: skip

    resihp_expert_copies: int = _flag(
        1, "How many copies are kept of experts that only one worker holds, in the host memory of another: 1 or 0. "
        "With one, the job goes on after that worker's death. A copy is on another node where there is one. With "
        "--use-distributed-optimizer, parts of its state have copies in any case.", metavar="N",
    )  # fmt: skip

    resihp_strategy: str = _flag(
        UNIFORM, "The strategy that plans when workers die. One of " + ", ".join(STRATEGIES) + "; uniform makes as "
        "many complete replicas as possible, and is the fallback if a strategy has no plan that can run.",
        metavar="NAME",
    )  # fmt: skip

    resihp_plan_wait: float = _flag(
        PLAN_WAIT_S, "How long a recovery waits for the strategy's plan where complete replicas exist. After that they "
        "train, and the strategy's plan becomes a voluntary change once it pays off.", metavar="SECONDS",
    )  # fmt: skip

    resihp_memory_reserve: float = _flag(
        MEMORY_RESERVE, "Percent of each device's memory that plans leave free, for its context, communicators and "
        "fragmentation.", metavar="PERCENT",
    )  # fmt: skip

    resihp_act: str = _flag(
        ACTS[0], "What to do when another plan would be faster. observe: only log an event; "
        "ask: write the plan to RUN_DIR/proposals, for `resihp apply`; act: change to it.", metavar="MODE",
    )  # fmt: skip
    resihp_seconds_between_changes: float = _flag(
        60.0, "Least time from one voluntary change of plan to the next.", metavar="SECONDS"
    )  # fmt: skip

    resihp_megatron_random_streams: bool = _flag(
        False, "Draw dropout masks and other noise from Megatron's own random streams, as a job without --resihp does. "
        "An iteration that is repeated after a failure then has other masks than it would have had.",
    )  # fmt: skip

    resihp_carrier: str = _flag(
        HOST, "What carries gradients and results between workers under a plan that Megatron's own groups can't run. "
        "host: gloo, through host memory; device: the job's own backend, in one more group of all workers. After "
        "an error on the device path, all workers fall back to the host path.", metavar="CARRIER",
    )  # fmt: skip

    resihp_cost_model: str | None = _flag(
        None, "The cost_model.json of an earlier run of the job, so that the detector looks for slow workers from the "
        "first iterations on; default: the one in the run directory, if any.", metavar="FILE",
    )  # fmt: skip

    def injections(self) -> tuple[Injection, ...]:
        """The failures to stage.

        Raises:
            ConfigError: if a fault injection or a file of faults cannot be read.
        """
        return tuple(Injection.parse(text) for text in self._injection_texts() if Slowdown.parse(text) is None)

    def slowdowns(self) -> tuple[Slowdown, ...]:
        """The slowdowns to stage.

        Raises:
            ConfigError: if a slowdown is invalid, or a file of faults cannot be read.
        """
        return tuple(slow for text in self._injection_texts() if (slow := Slowdown.parse(text)) is not None)

    def plans(self) -> tuple[ScheduledPlan, ...]:
        """The plans to ask for, in the order of their iterations.

        Raises:
            ConfigError: a plan does not have the form FILE[@ITERATION].
        """
        files = [text for text in self.resihp_plan if text != AUTO]
        return tuple(sorted(map(ScheduledPlan.parse, files), key=lambda plan: plan.iteration))

    @property
    def begins_with_a_plan(self) -> bool:
        """Whether the planner chooses the job's first layout."""
        return AUTO in self.resihp_plan

    def _injection_texts(self) -> list[str]:
        return [line for text in self.resihp_inject for line in (_read(text[1:]) if text[:1] == "@" else [text])]

    def check(self) -> None:
        """Raises: ConfigError: a value is invalid."""
        check_false_alarms("--resihp-false-alarms-per-job", self.resihp_false_alarms_per_job)
        if self.resihp_strategy not in STRATEGIES:
            mend = f"{suggestion(self.resihp_strategy, STRATEGIES)}choose from {', '.join(STRATEGIES)}"
            raise ConfigError(f"--resihp-strategy {self.resihp_strategy} is no strategy; {mend}")
        if self.resihp_expert_copies not in (0, 1):
            raise ConfigError(f"--resihp-expert-copies {self.resihp_expert_copies} can't be kept; give 0 or 1")
        if self.resihp_act not in ACTS:
            raise ConfigError(f"--resihp-act {self.resihp_act} is no mode; choose from {', '.join(ACTS)}")
        if self.resihp_act != ACTS[0] and self.resihp_strategy == UNIFORM:
            mend = "give --resihp-strategy joint, for example"
            raise ConfigError(f"--resihp-act {self.resihp_act} needs a strategy that reacts to slow workers; {mend}")
        if self.resihp_carrier not in CARRIERS:
            raise ConfigError(
                f"--resihp-carrier {self.resihp_carrier} is not a carrier; choose from {', '.join(CARRIERS)}"
            )
        if not self.resihp_answer_timeout > 0:
            seconds = f"{self.resihp_answer_timeout:g}"
            raise ConfigError(f"--resihp-answer-timeout {seconds} is not a time to wait; give more than 0 seconds")
        if not 0 <= self.resihp_plan_wait <= MOST_PLAN_WAIT_S:  # not NaN either
            seconds = f"{self.resihp_plan_wait:g}"
            raise ConfigError(f"--resihp-plan-wait {seconds} is invalid; give 0 to {MOST_PLAN_WAIT_S:g} seconds")
        check_reserve("--resihp-memory-reserve", self.resihp_memory_reserve)
        if not self.resihp_seconds_between_changes >= 0:
            seconds = f"{self.resihp_seconds_between_changes:g}"
            raise ConfigError(f"--resihp-seconds-between-changes {seconds} is invalid; give 0 or more")

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "ResihpConfig":
        return cls(**{item.name: getattr(namespace, item.name) for item in fields(cls)})


def _said(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _read(path: str) -> list[str]:
    try:
        injections = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resihp-inject @{path} cannot be read: {error}") from error
    if not isinstance(injections, list) or not all(isinstance(injection, str) for injection in injections):
        raise ConfigError(f'--resihp-inject @{path} is not a JSON list of faults, e.g. ["slow:3:0.6@10", "clear@20"]')
    return injections


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the --resihp* flags to Megatron's parser."""
    group = parser.add_argument_group(title="resihp")
    for item in fields(ResihpConfig):
        options = dict(item.metadata)
        if item.type is bool:
            options["action"] = "store_true"
        else:
            options["type"] = item.type if item.type in (int, float) else str
            options["default"] = item.default
            if item.default not in (None, ()):
                options["help"] = f"{options['help']} (default {_said(item.default)})"
        group.add_argument("--" + item.name.replace("_", "-"), **options)
    return parser
