# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of the check and prints one JSON object for each case, and one for all as the last line.

The parts are dealt out to three calls, for machines that end long commands. Exit code 1: a case has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aborts
import detecting
import device
import engine_jobs
import faulty_jobs
import groups
import packing
import paths
import probes
import rebuild
from setting import Row, Setting

CALL_S: Final = 440.0
"""Seconds after which a call begins no new case. The last one may still take a job and its reference."""


@dataclass(frozen=True)
class Part:
    """Cases that belong together.

    Attributes:
        call: in which of the three calls it runs.
        cases: their names, which no other part has.
    """

    name: str
    call: int
    run: Callable[[Setting], Iterator[Row]]
    cases: Collection[str]
    what: str


PARTS: Final = (
    Part("device", 1, device.run, device.CASES, "the device, its driver and libraries"),
    Part("aborts", 1, aborts.run, aborts.CASES, "a peer dies or stops: aborts, the device afterwards, the next world"),
    Part("paths", 1, paths.run, paths.CASES, "GB/s of every way that state and gradients take"),
    Part("packing", 1, packing.run, packing.CASES, "how fast gradients of slices are packed, against a copy"),
    Part("groups", 1, groups.run, groups.CASES, "seconds to make the communicators of an epoch, and how many"),
    Part("probes", 1, probes.run, probes.CASES, "what probes cost an iteration"),
    Part(
        "kills",
        2,
        faulty_jobs.run_kills,
        faulty_jobs.KILLS,
        "jobs with a fault at each kind of point, against undisturbed ones",
    ),
    Part("plans", 3, faulty_jobs.run_plans, faulty_jobs.PLANS, "real jobs under heterogeneous plans, there and back"),
    Part("rebuild", 3, rebuild.run, rebuild.CASES, "a recovery of a job that fills 55 and 85 % of the device's memory"),
    Part("detecting", 3, detecting.run, detecting.CASES, "errors of predictions; a slowed device is named"),
    Part("engine", 3, engine_jobs.run, engine_jobs.CASES, "a death in a job with Transformer Engine, if it is there"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested cases; returns the exit code."""
    asked = _parser().parse_args(argv)
    parts = [part for part in PARTS if part.name in asked.part] if asked.part else _of_call(asked)
    if asked.list:
        for part in parts:
            print(f"{part.name:9}  call {part.call}  {part.what}")
        return 0
    out = asked.out or Path(tempfile.mkdtemp(prefix="gpu_check-"))
    out.mkdir(parents=True, exist_ok=True)
    setting = Setting(asked.stand_in, out, time.monotonic() + asked.seconds, frozenset(asked.case))
    unknown = setting.cases.difference(*(part.cases for part in parts))
    if unknown:
        print(f"gpu_check: no such case: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    failed = [part.name for part in parts if not _passes(part, setting)]
    print(json.dumps({"parts": len(parts), "failed": len(failed), "failed_parts": failed, "stand_in": asked.stand_in}))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stand-in", action="store_true", help="rehearse on CPUs, with gloo in NCCL's place")
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="only the parts of this call (default: all)")
    parser.add_argument("--part", nargs="+", default=[], choices=[part.name for part in PARTS], help="only these parts")
    parser.add_argument("--case", nargs="+", default=[], help="only these cases of the parts")
    parser.add_argument("--out", type=Path, help="folder for logs (default: a new one)")
    parser.add_argument("--seconds", type=float, default=CALL_S, help="begin no case later (default: %(default)g)")
    parser.add_argument("--list", action="store_true", help="say what would run")
    return parser


def _of_call(asked: argparse.Namespace) -> list[Part]:
    return [part for part in PARTS if asked.call in (None, part.call)]


def _passes(part: Part, setting: Setting) -> bool:
    good = True
    for row in part.run(setting):
        good &= bool(row["ok"])
        print(json.dumps({"part": part.name, **row}), flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
