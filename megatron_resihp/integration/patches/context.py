# SPDX-License-Identifier: Apache-2.0
"""What --context-parallel-size means for the other arguments of a job. Imports `config`."""

import argparse

from megatron_resihp.config import UNIFORM, ConfigError, ResihpConfig


def size_of_replica(args: argparse.Namespace) -> int:
    """How many workers run the same micro-batches."""
    size: int = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    return size


def check_context(config: ResihpConfig, args: argparse.Namespace) -> None:
    """Look for flags of ours that don't know of sequences that replicas share.

    Raises:
        ConfigError: there is one.
    """
    if args.context_parallel_size == 1:
        return
    unknown = {
        f"--resihp-strategy {config.resihp_strategy}": config.resihp_strategy != UNIFORM,
        "--resihp-plan auto": config.begins_with_a_plan,
        "--resihp-emulate": config.resihp_emulate is not None,
        "--resihp-spread-replicas": config.resihp_spread_replicas,
    }
    found = next((flag for flag, given in unknown.items() if given), None)
    if found is not None:
        mend = "leave it or --context-parallel-size out"
        raise ConfigError(f"{found} doesn't know of sequences that replicas share; {mend}")
