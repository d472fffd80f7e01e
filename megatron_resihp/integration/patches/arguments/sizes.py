# SPDX-License-Identifier: Apache-2.0
"""Whether a job's numbers of workers, layers and samples fit together. Imports `plan` and `integration`'s pure modules.

What Megatron would assert on every worker is said here in one line. Each check raises a ConfigError.
"""

import argparse
import copy
import math

from megatron_resihp.config import ConfigError
from megatron_resihp.integration.patches.arguments.context import size_of_replica
from megatron_resihp.integration.support.batches import batch_steps
from megatron_resihp.integration.world.own_layers import own_chunks
from megatron_resihp.plan import PlanError
from megatron_resihp.plan.microbatches import can_be_grouped


def check_sizes(args: argparse.Namespace) -> None:
    """Sizes that no plan fits, said before Megatron's own assertion says it on every worker. `world_size` is known."""
    replica, sharers = size_of_replica(args), _size_of_sharers(args)
    together = math.lcm(replica, sharers)
    of_replicas = "TP x PP" if args.context_parallel_size == 1 else "TP x CP x PP"
    for sizes, product in ((of_replicas, replica), ("experts' TP x EP x PP", sharers)):
        if args.world_size % product:
            workers = f"{args.world_size} worker{' is' if args.world_size == 1 else 's are'}"
            raise ConfigError(
                f"{workers} not a multiple of {sizes} = {product}, so no plan exists; "
                f"start {max(args.world_size // together, 1) * together} or change the parallel sizes"
            )
    replicas = args.world_size // replica
    per_step = (args.micro_batch_size or 0) * replicas
    for flag, batch in _batches(args) if per_step else ():
        if batch < per_step:
            raise ConfigError(
                f"{flag} {batch} gives {replicas} replicas less than one micro-batch each; give {per_step} or a "
                "multiple"
            )
        if batch % per_step:
            raise ConfigError(
                f"{flag} {batch} is not a multiple of micro-batch size x replicas = "
                f"{per_step}, so no plan exists at the start; change one of them"
            )


def with_fitting_sizes(args: argparse.Namespace) -> argparse.Namespace:
    """The same flags for as many workers, and samples in a batch, as fit: to find what else is wrong with them."""
    fitting = copy.deepcopy(args)
    replica = size_of_replica(args)
    fitting.world_size = math.lcm(replica, _size_of_sharers(args)) * args.num_distributed_optimizer_instances
    fitting.global_batch_size = (args.micro_batch_size or 1) * (fitting.world_size // replica)
    fitting.eval_global_batch_size = fitting.eval_micro_batch_size = None
    fitting.step_batch_size_schedule = fitting.rampup_batch_size = None
    return fitting


def _size_of_sharers(args: argparse.Namespace) -> int:
    """How many workers all experts of all stages are shared out to."""
    members: int = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    size: int = members * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return size


def _batches(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The global batches before Megatron's validation, and what gives them."""
    if args.step_batch_size_schedule is None:
        return [("--global-batch-size", args.global_batch_size)] if args.global_batch_size else []
    return [("a batch of --step-batch-size-schedule,", size) for _, size in batch_steps(vars(args))]


def check_pipeline(args: argparse.Namespace) -> None:
    """Of validated arguments: whether each stage, and each chunk of an interleaved pipeline, has its layers."""
    try:
        chunks = own_chunks(args)
    except PlanError as error:
        mend = "change --num-layers, or how many layers stages have"
        raise ConfigError(f"the pipeline can't be built: {error}; {mend}") from error
    empty = next((number for number, chunk in enumerate(chunks) if chunk.end == chunk.first), None)
    if empty is not None and args.virtual_pipeline_model_parallel_size is not None:
        raise ConfigError(
            f"chunk {empty} of the interleaved pipeline has no layers, which is not supported; give it some"
        )
    if args.overlap_p2p_comm_warmup_flush and not args.overlap_p2p_comm:
        raise ConfigError(
            "--overlap-p2p-communication-warmup-flush needs an interleaved pipeline whose communication overlaps; "
            "leave it out"
        )


def check_sequence(args: argparse.Namespace) -> None:
    """Of validated arguments: whether members of a stage can share a sequence. Megatron asserts that only in the first
    forward pass."""
    members, context = args.tensor_model_parallel_size, args.context_parallel_size
    if args.sequence_parallel and args.seq_length and args.seq_length % (members * context):
        sizes = f"TP = {members}" if context == 1 else f"TP x CP = {members * context}"
        raise ConfigError(
            f"--seq-length {args.seq_length} is not a multiple of {sizes}, as --sequence-parallel "
            "needs; give a multiple, or leave that flag out"
        )


def check_instances(args: argparse.Namespace) -> None:
    """Parts of a distributed optimizer have copies in other replicas of their instance."""
    replicas = args.world_size // size_of_replica(args)
    instances = args.num_distributed_optimizer_instances
    if 1 < replicas <= instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} leaves each of {replicas} replicas all of the "
            "optimizer's state; leave it and --use-distributed-optimizer out"
        )


def check_batches(args: argparse.Namespace) -> None:
    """Of validated arguments: whether each replica gets micro-batches that its pipeline can run."""
    replicas = args.world_size // size_of_replica(args)
    evaluated, size = args.eval_global_batch_size, args.eval_micro_batch_size or args.micro_batch_size
    if evaluated // size < replicas:
        flag = f"--eval-global-batch-size {evaluated}"
        raise ConfigError(f"{flag} gives {replicas} replicas less than one micro-batch each; raise it")
    if args.virtual_pipeline_model_parallel_size is not None:
        _check_interleaving(args, replicas)


def _check_interleaving(args: argparse.Namespace, replicas: int) -> None:
    """What Megatron's schedule would raise on every worker in the first iteration."""
    sizes = [size for _, size in batch_steps(vars(args))] or [args.global_batch_size]
    shares = {f"--global-batch-size {size}": size // args.micro_batch_size for size in sizes}
    if args.eval_iters:
        evaluated, size = args.eval_global_batch_size, args.eval_micro_batch_size or args.micro_batch_size
        shares[f"--eval-global-batch-size {evaluated}"] = evaluated // size
    stages = args.pipeline_model_parallel_size
    wanted = args.microbatch_group_size_per_vp_stage or stages
    for flag, micro_batches in shares.items():
        share = micro_batches // replicas
        if not can_be_grouped(stages, share, wanted):
            raise ConfigError(
                f"{flag} gives each replica {share} micro-batches, and an interleaved pipeline of {stages} stages "
                f"can't run these in groups of {wanted}; give a multiple of {wanted} for each replica"
            )
