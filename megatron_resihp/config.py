"""The --resihp* flags: one dataclass is the source for argparse, the documentation and JSON. Imports nothing."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

DRILL_POINTS = (
    "forward", "backward", "p2p", "grad-sync", "norm", "step", "between", "evaluate", "save",
    "recovery-muster", "recovery-rebuild", "recovery-ready",
)  # fmt: skip


class ConfigError(ValueError):
    """A flag that cannot be; the message is one line that names cause and mend."""


@dataclass(frozen=True)
class Drill:
    """A failure to stage when `worker` reaches `point` in `iteration` (1-based).

    Actions: kill (SIGKILL), stop (SIGSTOP), rebuild (the worker reports a communication error, nobody is lost).
    """

    action: str
    worker: int
    iteration: int
    point: str = "forward"

    PATTERN = re.compile(r"(kill|stop|rebuild):(\d+)@([1-9]\d*)(?::([a-z0-9-]+))?")

    @classmethod
    def parse(cls, text: str) -> "Drill":
        """Read ACTION:WORKER@ITERATION[:POINT].

        Raises:
            ConfigError: if it is not of that form.
        """
        match = cls.PATTERN.fullmatch(text)
        if not match:
            form = "ACTION:WORKER@ITERATION[:POINT], e.g. kill:3@10:backward"
            raise ConfigError(f"--resihp-drill {text!r} is not {form}")
        action, worker, iteration, point = match.groups()
        if point is not None and point not in DRILL_POINTS:
            raise ConfigError(f"--resihp-drill {text!r}: no point {point!r}; choose from {', '.join(DRILL_POINTS)}")
        return cls(action, int(worker), int(iteration), point or "forward")


def _flag(default: Any, help_text: str, **options: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **options})


@dataclass(frozen=True)
class ResihpConfig:
    """What a user can set; each field is a flag of the same name in Megatron's own --help."""

    resihp: bool = _flag(False, "Keep the job running in place when workers die. Start it with `resihp launch`.")
    resihp_drill: Sequence[str] = _flag(
        (), "Fire drills: ACTION:WORKER@ITERATION[:POINT] with ACTION kill, stop or rebuild and POINT one of "
        + ", ".join(DRILL_POINTS) + " (default forward).", nargs="+", metavar="DRILL",
    )  # fmt: skip
    resihp_record_samples: bool = _flag(
        False, "Write the indices of the samples really fed to the model to the event log, iteration by iteration."
    )
    resihp_record_digests: bool = _flag(
        False, "Write a digest of every worker's parameters and optimizer state to the event log at the end."
    )
    resihp_answer_timeout: float = _flag(
        60.0, "Seconds that a worker with a communication error waits for the coordinator before it gives up.",
        metavar="SECONDS",
    )  # fmt: skip

    resihp_false_alarms_per_job: float = _flag(
        0.01, "How many false reports of a slow worker or link you accept in a whole job, on average: more than 0, at "
        "most 1.", metavar="N",
    )  # fmt: skip

    def drills(self) -> tuple[Drill, ...]:
        return tuple(Drill.parse(text) for text in self.resihp_drill)

    def check(self) -> None:
        """Raises:
        ConfigError: a value cannot be.
        """
        budget = self.resihp_false_alarms_per_job
        if not 0 < budget <= 1:
            raise ConfigError(f"--resihp-false-alarms-per-job {budget:g} cannot be; give more than 0 and at most 1")

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "ResihpConfig":
        return cls(**{item.name: getattr(namespace, item.name) for item in fields(cls)})


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the --resihp* flags to Megatron's parser."""
    group = parser.add_argument_group(title="resihp")
    for item in fields(ResihpConfig):
        options = dict(item.metadata)
        if item.type is bool:
            options["action"] = "store_true"
        else:
            options["type"] = float if item.type is float else str
            options["default"] = item.default
        group.add_argument("--" + item.name.replace("_", "-"), **options)
    return parser
