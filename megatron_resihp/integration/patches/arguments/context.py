# SPDX-License-Identifier: Apache-2.0
"""What sequences and experts that replicas share mean for the other arguments of a job. Imports `config`."""

import argparse

from megatron_resihp.config import JOINT, UNIFORM, ConfigError, ResihpConfig


def size_of_replica(args: argparse.Namespace) -> int:
    """How many workers run the same micro-batches."""
    size: int = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    return size


def check_sharing(config: ResihpConfig, args: argparse.Namespace) -> None:
    """Look for flags that don't go with sequences or experts that replicas share.

    Raises:
        ConfigError: there is one.
    """
    for flag, what in (("context_parallel_size", "sequences"), ("expert_model_parallel_size", "experts")):
        if getattr(args, flag) > 1:
            _check_ours(config, "--" + flag.replace("_", "-"), what)
    if args.expert_model_parallel_size > 1 and args.add_bias_linear:
        raise ConfigError(
            "--expert-model-parallel-size needs --disable-bias-linear with --resihp: Megatron doesn't train experts "
            "with biases under plans that give all of them to each replica; add it"
        )


def _check_ours(config: ResihpConfig, given: str, what: str) -> None:
    unknown = {
        f"--resihp-strategy {config.resihp_strategy}": config.resihp_strategy not in (UNIFORM, JOINT),
        "--resihp-plan auto": config.begins_with_a_plan,
        "--resihp-spread-replicas": config.resihp_spread_replicas,
    }
    found = next((flag for flag, is_given in unknown.items() if is_given), None)
    if found is not None:
        raise ConfigError(f"{found} doesn't know of {what} that replicas share; leave out this flag or {given}")
