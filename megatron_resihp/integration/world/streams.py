# SPDX-License-Identifier: Apache-2.0
"""Megatron's own random streams, which start anew in each epoch. May import megatron.

Initial weights come from them. What a model draws in training comes from the package `streams`, unless the job asks for
Megatron's.
"""

from typing import Any

from megatron.training.initialize import _set_random_seed

SEED_STRIDE = 1_000_003


def start_streams(args: Any, epoch: int) -> None:
    """Start them from the seed, the epoch, the stage and, in Megatron, the TP rank."""
    _set_random_seed(args.seed + SEED_STRIDE * epoch, args.data_parallel_random_init, args.te_rng_tracker)
