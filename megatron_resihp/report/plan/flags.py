# SPDX-License-Identifier: Apache-2.0
"""The flags of `resihp plan` that give a job's sizes and its workers' health.

May import: the standard library, `config` and `cost.model.presets`, which needs no numpy, so that the `resihp` command
starts quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from megatron_resihp.config import MEMORY_RESERVE
from megatron_resihp.cost.model.presets import PRESETS

SIZES: Final[Mapping[str, Any]] = {
    "model": None,
    "gpus": None,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "etp": None,
    "dp": None,
    "micro_batches": 64,
    "micro_batch_size": 1,
    "seq_length": 4096,
    "recompute": "none",
    "sequence_parallel": False,
    "distributed_optimizer": False,
}
"""Defaults of the job's sizes. The parser leaves flags that are not given as None, because RUN_DIR gives all sizes and
no size flag may stand beside it.
"""


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that give a job's sizes, and its devices."""
    job = parser.add_argument_group("the job, unless RUN_DIR is given")
    job.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    job.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default TP x CP x PP x DP)")
    job.add_argument("--tp", type=int, metavar="N", help="tensor-parallel degree (default 1)")
    job.add_argument("--pp", type=int, metavar="N", help="pipeline stages (default 1)")
    job.add_argument("--cp", type=int, metavar="N", help="context-parallel degree (default 1)")
    job.add_argument("--ep", type=int, metavar="N", help="expert-parallel degree (default 1)")
    job.add_argument("--etp", type=int, metavar="N", help="tensor-parallel degree of experts (default as --tp)")
    job.add_argument("--dp", type=int, metavar="N", help="replicas (default: as many as --gpus gives)")
    job.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of a global batch (default 64)")
    job.add_argument("--micro-batch-size", type=int, metavar="N", help="samples in each (default 1)")
    job.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample (default 4096)")
    job.add_argument(
        "--recompute", choices=("none", "selective", "full"), help="which activations to recompute (default none)"
    )
    job.add_argument("--sequence-parallel", action="store_true", default=None, help="as in Megatron")
    job.add_argument("--distributed-optimizer", action="store_true", default=None, help="as in Megatron")
    device = parser.add_argument_group("the devices")
    device.add_argument(
        "--workers-per-node", type=int, metavar="N", help="workers per node (default 8, or as RUN_DIR says)"
    )
    device.add_argument("--memory-gib", type=float, default=80.0, metavar="GIB", help="memory of each GPU (default 80)")
    device.add_argument(
        "--memory-reserve", type=float, metavar="PERCENT",
        help=f"percent of GPU memory that plans leave free (default {MEMORY_RESERVE:g}, or as RUN_DIR says)",
    )  # fmt: skip
    device.add_argument(
        "--tflops", type=float, default=312.0, metavar="X", help="peak TFLOP/s of each GPU (default %(default)g)"
    )
    device.add_argument(
        "--gbps", type=float, default=200.0, metavar="X",
        help="bandwidth of each GPU to other nodes, in Gbit/s (default %(default)g: a network card per GPU)",
    )  # fmt: skip


def add_uneven_argument(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """The flag that lets `joint` make plans which no job can run yet."""
    group.add_argument(
        "--uneven", action="store_true", help="let joint give the members of a stage unequal shards, say 3 of 4 GPUs; "
        "no job can run such plans yet",
    )  # fmt: skip


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags for dead and slow workers and slow links, and for the time until the next event."""
    group = parser.add_argument_group("health of the workers")
    group.add_argument("--dead", nargs="+", default=[], metavar="W", help="workers that are gone, such as 3 or 8-15")
    group.add_argument(
        "--slow", nargs="+", default=[], metavar="W=P", help="workers at speed P, in (0, 1], of their own: 5=0.5"
    )
    group.add_argument(
        "--link", nargs="+", default=[], metavar="A-B=F", help="links at F, in (0, 1], of their bandwidth: 1-5=0.3"
    )
    group.add_argument(
        "--until-next-event", type=float, default=1.0, metavar="H",
        help="hours in which a change must pay for itself (default %(default)g, as in a running job)",
    )  # fmt: skip
