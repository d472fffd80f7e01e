# SPDX-License-Identifier: Apache-2.0
"""Checks the survivors' communicators, device and memory after a peer dies or stops.

Three processes, on one GPU, have the world and three more groups. Rank 2 ends; ranks 0 and 1 have collectives under way
in some of the groups, and kernels queued behind. A second thread aborts through the plugin's own `Communicators`, as in
a recovery. Imports the standard library; the processes run `abort_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from setting import Row, Setting
from workers import run_workers

WORLD: Final = 3
ABORT_S: Final = 5.0
"""The longest that an abort may take."""
LEFT_MIB: Final = 200
"""The most device memory that may be missing afterwards."""


@dataclass(frozen=True)
class Case:
    """One way in which a peer is lost.

    Attributes:
        hung: which of the four groups have collectives under way.
        peer: how rank 2 is lost: it "dies", is "stopped", or dies while a group is "made".
        how: "plugin", or an alternative for comparison: "serial" aborts, torch's "shrink".
        environment: of all processes.
        required: whether the plugin depends on it; the other cases are for comparison.
    """

    hung: tuple[int, ...] = ()
    peer: str = "dies"
    how: str = "plugin"
    environment: Mapping[str, str] = field(default_factory=dict)
    required: bool = True


NON_BLOCKING: Final = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10"}
CASES: Final[Mapping[str, Case]] = {
    "first-hangs": Case((0,)),
    "last-hangs": Case((3,)),
    "two-hang": Case((1, 3)),
    "peer-stopped": Case((1, 3), peer="stopped"),
    "two-hang-without-cumem": Case((1, 3), environment={"NCCL_CUMEM_ENABLE": "0"}),
    "while-made": Case(peer="made"),
    "two-hang-non-blocking": Case((1, 3), environment=NON_BLOCKING, required=False),
    "while-made-non-blocking": Case(peer="made", environment=NON_BLOCKING, required=False),
    "serial-two-hang": Case((1, 3), how="serial", required=False),
    "shrink": Case((0,), how="shrink", required=False),
}
ON_CPU: Final = ("first-hangs", "two-hang", "peer-stopped")
"""Those that are not the same, or impossible, with gloo."""


def run(setting: Setting, name: str) -> Row:
    if setting.stand_in and name not in ON_CPU:
        return {"ok": True, "left_out": "only with NCCL"}
    case = CASES[name]
    rows = run_workers(
        setting, f"aborts-{name}", "abort_worker.py", asdict(case), WORLD, awaited=2, environment=case.environment
    )
    good = all(map(_is_good, rows))
    return {"ok": good or not case.required, "good": good, "required": case.required, "survivors": rows}


def _is_good(row: Mapping[str, Any]) -> bool:
    return (
        row["code"] == 0
        and row.get("abort_s", ABORT_S) < ABORT_S
        and row.get("device_usable") is True
        and row.get("next_world_sums") is True
        and row.get("left_mib", 0) <= LEFT_MIB
    )
