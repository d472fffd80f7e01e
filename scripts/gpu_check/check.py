# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of the check and prints one JSON object for each case, and one for all as the last line.

The parts are dealt out to three calls, for machines that end long commands. Each case runs in a process of its own,
with a time limit. Exit code 1: a case has failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
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
from setting import Setting
from supervise import Part, run_cases

CALL_S: Final = 470.0
"""Seconds after which a call's last case is ended."""
REHEARSAL_S: Final = 3600.0
"""The same for a rehearsal, where few cores do the work of a device."""
BESIDE: Final = 4
"""Jobs at a time on a device: each takes 40 s or more, most of it Python's start, on some four cores."""

PARTS: Final = (
    Part("device", 1, device.run, device.CASES, 60, "the device, its driver and libraries"),
    Part("aborts", 1, aborts.run, aborts.CASES, 75, "a peer dies or stops: aborts, the device, the next world"),
    Part("paths", 1, paths.run, paths.CASES, 60, "GB/s of every way that state and gradients take"),
    Part("packing", 1, packing.run, packing.CASES, 60, "how fast gradients of slices are packed, against a copy"),
    Part("groups", 1, groups.run, groups.CASES, 75, "seconds to make the communicators of an epoch, and how many"),
    Part("probes", 1, probes.run, probes.CASES, 120, "what probes cost an iteration"),
    Part("kills", 2, faulty_jobs.run_kill, faulty_jobs.KILLS, 90, "jobs with a fault at each kind of point", True),
    Part("plans", 3, faulty_jobs.run_plan, faulty_jobs.PLANS, 120, "jobs under heterogeneous plans", True),
    Part(
        "rebuild",
        3,
        rebuild.run,
        rebuild.CASES,
        150,
        "a recovery of a job that fills 55 and 85 % of the device",
    ),
    Part("detecting", 3, detecting.run, detecting.CASES, 150, "errors of predictions; a slowed device is named"),
    Part("engine", 3, engine_jobs.run, engine_jobs.CASES, 120, "a death in a job with Transformer Engine", True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested cases; returns the exit code."""
    asked = _parser().parse_args(argv)
    parts = [part for part in PARTS if part.name in asked.part] if asked.part else _of_call(asked)
    if asked.list:
        for part in parts:
            print(f"{part.name:9}  call {part.call}  {part.what}")
        return 0
    unknown = set(asked.case).difference(*(part.cases for part in parts))
    if unknown:
        print(f"gpu_check: no such case: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    out = (asked.out or Path(tempfile.mkdtemp(prefix="gpu_check-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        print(f"gpu_check: {out} is not empty; name a new folder", file=sys.stderr)
        return 2
    seconds = asked.seconds or (REHEARSAL_S if asked.stand_in else CALL_S)
    setting = Setting(asked.stand_in, out, time.monotonic() + seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = [part.name for part in parts if not _passes(part, setting, asked)]
    print(json.dumps({"parts": len(parts), "failed": len(failed), "failed_parts": failed, "stand_in": asked.stand_in}))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stand-in", action="store_true", help="rehearse on CPUs, with gloo in NCCL's place")
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="only the parts of this call (default: all)")
    parser.add_argument("--part", nargs="+", default=[], choices=[part.name for part in PARTS], help="only these parts")
    parser.add_argument("--case", nargs="+", default=[], help="only these cases of the parts")
    parser.add_argument("--out", type=Path, help="folder for logs; must be new or empty")
    limit = f"end all cases by then (default: {CALL_S:g}, in a rehearsal {REHEARSAL_S:g})"
    parser.add_argument("--seconds", type=float, help=limit)
    beside = f"jobs that are not timed and run at the same time (default: {BESIDE}, in a rehearsal 1)"
    parser.add_argument("--beside", type=int, help=beside)
    parser.add_argument("--list", action="store_true", help="say what would run")
    return parser


def _of_call(asked: argparse.Namespace) -> list[Part]:
    return [part for part in PARTS if asked.call in (None, part.call)]


def _passes(part: Part, setting: Setting, asked: argparse.Namespace) -> bool:
    good = True
    names = [name for name in part.cases if not asked.case or name in asked.case]
    beside = asked.beside or (1 if asked.stand_in else BESIDE)
    with closing(run_cases(part, names, setting, beside if part.beside else 1)) as rows:
        for row in rows:
            good &= bool(row["ok"])
            print(json.dumps({"part": part.name, **row}), flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
