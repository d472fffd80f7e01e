# SPDX-License-Identifier: Apache-2.0
"""The training settings on which memory and work depend. Imports `plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import Any, Final

from megatron_resihp.plan import OwnSplit, ParallelPlan
from megatron_resihp.plan.experts import busiest_share, most_experts

MASTER_AND_MOMENTS: Final = 12
"""Bytes of optimizer state per parameter with 16-bit weights: fp32 weight and Adam's two moments."""
MOMENTS: Final = 8
SCALED_BY_BLOCK: Final = ("blockwise", "mxfp8")
"""Recipes of 8 bits whose scales are of parts that no cut between tensor-parallel members divides."""


class Recompute(StrEnum):
    """Which activations the backward computes again: none, attention's scores, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class TrainingError(ValueError):
    """Arguments that ask for a feature that is not modelled; the message names the argument."""


@dataclass(frozen=True)
class Training:
    """Settings of a job that a failure does not change.

    Attributes:
        sequence_length: tokens per sample.
        micro_batch_size: samples per micro-batch.
        recompute: which activations are computed again.
        sequence_parallel: whether activations that all tensor-parallel members would hold are cut along the sequence.
        only_degree: the number of tensor-parallel members that each stage must have (`why_own_degree`); None: any.
        distributed_optimizer: whether the holders of a shard share its optimizer state.
        shared_by: the plans under which they do: those that Megatron's own groups can run; None: all plans.
        optimizer_instances: how many groups of holders have all of it, where that leaves equal groups of two or more.
        weight_bytes, gradient_bytes, optimizer_bytes: per parameter.
        context_parallel: number of replicas that share each sequence.
        gathers_context: whether these gather all keys and values before they attend, instead of passing parts around a
            ring while they attend to others.
        expert_parallel: number of workers that share routed experts.
        expert_loads: how many tokens each expert of a layer gets, in any unit; empty: all as many.
        busiest_shares: what `busiest_share` was measured to be where 1, 2, … workers share experts; of more, or where
            this is empty, it follows from `expert_loads`.
        expert_tensor_parallel: number of workers that share each expert; None means as many as share the other layers.
        expert_groups: groups of a stage's members that have other experts each, in a plan (its `expert_members`).
        splits_backward: whether weight gradients can be delayed. Only Megatron's own ("local") linear layers can. In
            other layers, B does the whole backward and W does nothing.
        deferred: most micro-batches of which the head's activations stay until the pipeline has drained, where its
            weight gradients are computed then; None: all of them.
    """

    sequence_length: int
    micro_batch_size: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    only_degree: int | None = None
    distributed_optimizer: bool = False
    shared_by: OwnSplit | None = None
    optimizer_instances: int = 1
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = MASTER_AND_MOMENTS
    context_parallel: int = 1
    gathers_context: bool = False
    expert_parallel: int = 1
    expert_loads: tuple[float, ...] = ()
    busiest_shares: tuple[float, ...] = ()
    expert_tensor_parallel: int | None = None
    expert_groups: int = 1
    splits_backward: bool = True
    deferred: int | None = 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.sequence_length

    def instances_of(self, holders: int, degree: int) -> int:
        """How many groups of a shard's holders have all of its optimizer state.

        Args:
            degree: number of tensor-parallel members of a stage.
        """
        own = self.optimizer_instances
        return own if holders > own and self.with_same_experts(holders, degree) % own == 0 else 1

    def with_same_experts(self, holders: int, degree: int) -> Fraction:
        """How many workers have the same part of the same experts, of so many holders of a shard."""
        return Fraction(holders * degree, (self.expert_tensor_parallel or degree) * self.expert_parallel)

    def can_share(self, degree: int) -> bool:
        """Whether tensor-parallel members get equal parts of a shared sequence, as Megatron requires."""
        return not self.sequence_parallel or self.sequence_length // self.context_parallel % degree == 0

    def busiest_share(self, experts: int) -> float:
        """Tokens of the worker whose experts get most of them, over the mean. `experts`: of a layer."""
        loads, degree = self.expert_loads or (1.0,) * experts, self.expert_parallel * self.expert_groups
        if degree <= len(self.busiest_shares):
            return self.busiest_shares[degree - 1]
        return 1.0 if len(loads) < degree else busiest_share(loads, degree)

    def fullest_share(self, experts: int) -> Fraction:
        """The part of a layer's experts that the worker with most of them has. `experts`: of a layer."""
        return Fraction(most_experts(experts, self.expert_parallel), experts)

    def as_plans_say(self, replicas: int = 1) -> "Training":
        """Where so many replicas share experts, and the members of a stage share a replica's as they do other layers:
        plans count sharers so."""
        return replace(self, expert_parallel=replicas, expert_tensor_parallel=None)

    def under(self, plan: ParallelPlan) -> "Training":
        """The settings under a plan: unless it is one that Megatron's own groups can run, each holder of a shard has
        all of its optimizer state.

        Raises:
            PlanError: a replica without layers has other stages than the job's own.
        """
        whole = self.distributed_optimizer and self.shared_by is not None and not self.shared_by.runs(plan)
        return replace(self, distributed_optimizer=False) if whole else self

    @property
    def squares(self) -> int:
        """Largest Σ l² of a micro-batch: each sample is one document."""
        return self.tokens * self.sequence_length


def training_from_arguments(arguments: Mapping[str, Any]) -> Training:
    """Megatron's arguments → Training; absent arguments have Megatron's default.

    Raises:
        TrainingError: `seq_length` is missing, or the kind of recomputation is not modelled.
    """
    if not arguments.get("seq_length"):
        raise TrainingError("seq_length is missing")
    half = bool(arguments.get("bf16") or arguments.get("fp16"))
    deferring = arguments.get("defer_embedding_wgrad_compute")
    half_gradients = arguments.get("grad_reduce_in_bf16") or arguments.get("fp16")
    return Training(
        sequence_length=arguments["seq_length"],
        micro_batch_size=arguments.get("micro_batch_size") or 1,
        recompute=_recompute(arguments),
        sequence_parallel=bool(arguments.get("sequence_parallel")),
        only_degree=(arguments.get("tensor_model_parallel_size") or 1) if why_own_degree(arguments) else None,
        distributed_optimizer=distributes_optimizer(arguments),
        optimizer_instances=arguments.get("num_distributed_optimizer_instances") or 1,
        weight_bytes=2 if half else 4,
        gradient_bytes=2 if half_gradients and not arguments.get("accumulate_allreduce_grads_in_fp32") else 4,
        optimizer_bytes=MASTER_AND_MOMENTS if half else MOMENTS,
        expert_parallel=arguments.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel=arguments.get("expert_tensor_parallel_size"),
        splits_backward=arguments.get("transformer_impl") == "local",
        deferred=(arguments.get("wgrad_deferral_limit") or None) if deferring else 0,
    )


def training_of_job(arguments: Mapping[str, Any], own: OwnSplit) -> Training:
    """A running job's settings, as its plans count sharers and as its workers share a distributed optimizer.

    Raises:
        TrainingError: as of `training_from_arguments`.
    """
    return replace(training_from_arguments(arguments).as_plans_say(), shared_by=own)


def distributes_optimizer(arguments: Mapping[str, Any]) -> bool:
    """Whether replicas own parts of the optimizer's state. Arguments are as given, or as Megatron has completed them:
    of Muon it then says that it is shared out by layers, and no longer that the optimizer is distributed."""
    by_layers = arguments.get("use_layer_wise_distributed_optimizer") or arguments.get("optimizer") == "dist_muon"
    return bool(arguments.get("use_distributed_optimizer") or by_layers)


def why_own_degree(arguments: Mapping[str, Any]) -> str:
    """Why stages of another tensor-parallel degree than the job's own would train otherwise; empty: they wouldn't."""
    if arguments.get("optimizer") in ("muon", "dist_muon"):
        return "Muon orthogonalises the part of a matrix that a member holds"
    if arguments.get("multi_latent_attention") and not arguments.get("sequence_parallel"):
        return "Megatron sums the gradients of latents that members share only beside --sequence-parallel"
    if arguments.get("multi_latent_attention") and _has_megatrons_layers_on_gpus(arguments):
        # `MLASelfAttention.get_query_key_value_tensors` gathers the keys' positions; the gather's backward only splits.
        return "in Megatron's own layers each member drops what the heads of others make of the keys' positions"
    if arguments.get("fp8") and arguments.get("fp8_recipe") not in SCALED_BY_BLOCK:
        return "an 8-bit scale is of the part of a tensor that a member holds"
    if arguments.get("num_experts") and arguments.get("use_transformer_engine_op_fuser"):
        return "Transformer Engine fuses the ops of whole experts only"
    if arguments.get("num_experts") and not arguments.get("sequence_parallel"):
        return "Megatron trains experts with tensor parallelism only beside --sequence-parallel"
    return ""


def _has_megatrons_layers_on_gpus(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("transformer_impl") == "local" and arguments.get("distributed_backend") == "nccl"


def why_own_context(arguments: Mapping[str, Any]) -> str:
    """Why other numbers of replicas that share each sequence than the job's own would train otherwise; empty: they
    wouldn't."""
    if "sinkhorn" in (arguments.get("moe_router_load_balancing_type") or ()):
        return "sinkhorn routes by the tokens that a worker has of a sequence"
    if arguments.get("hierarchical_context_parallel_sizes"):
        return "--hierarchical-context-parallel-sizes are of so many"
    if arguments.get("moe_expert_capacity_factor") is not None:
        return "--moe-expert-capacity-factor drops tokens by those that a worker has of a sequence"
    if "a2a" in _words(arguments.get("cp_comm_type")) and _may_share_otherwise(arguments):
        return "--cp-comm-type a2a deals attention heads to so many"
    return ""


def why_own_experts(arguments: Mapping[str, Any]) -> str:
    """Why other numbers of replicas that share each layer's experts than the job's own would train otherwise; empty:
    they wouldn't."""
    if arguments.get("fp8") and arguments.get("num_experts"):
        return "8-bit scales are of the tokens that an expert gets from all replicas that share it"
    return ""


def why_equal_rounds(arguments: Mapping[str, Any]) -> str:
    """Why replicas that share experts must have equally many micro-batches; empty: they needn't.

    Those with fewer run their last one again, so that it counts nothing. For that, its forward and backward passes must
    be calls of their own.
    """
    if why_own_experts(arguments):
        return why_own_experts(arguments)
    if arguments.get("overlap_moe_expert_parallel_comm"):
        return "--overlap-moe-expert-parallel-comm runs one micro-batch in turns with another"
    return ""


def why_powers_of_two(arguments: Mapping[str, Any]) -> str:
    """Why numbers of replicas that share experts must be powers of two; empty: they needn't."""
    if arguments.get("num_experts") and arguments.get("ddp_average_in_collective"):
        # DistributedDataParallel wants the same of two ways to round 1 / replicas; only a power of two sees to that.
        return "with --ddp-average-in-collective, Megatron refuses some numbers of replicas"
    return ""


def why_even_experts(arguments: Mapping[str, Any]) -> str:
    """Why replicas that share experts must have equal numbers of them; empty: they needn't."""
    if why_equal_rounds(arguments):
        return why_equal_rounds(arguments)
    if arguments.get("moe_expert_capacity_factor") is not None:
        return "no test covers it with --moe-expert-capacity-factor"
    if "sinkhorn" in (arguments.get("moe_router_load_balancing_type") or ()):
        return "no test covers it with sinkhorn"
    if (arguments.get("num_distributed_optimizer_instances") or 1) > 1:
        return "no test covers it with --num-distributed-optimizer-instances"
    if (arguments.get("context_parallel_size") or 1) > 1:
        return "no test covers it with context parallelism"
    if arguments.get("ddp_num_buckets"):
        return "with --ddp-num-buckets, what a worker holds says how its gradients are cut"
    return why_powers_of_two(arguments)


def _words(value: str | Sequence[str] | None) -> Sequence[str]:
    return [value] if isinstance(value, str) else value or ()


def _may_share_otherwise(arguments: Mapping[str, Any]) -> bool:
    """Whether a sequence can be cut for fewer replicas, of which the job's own number is no multiple."""
    own, tokens = arguments.get("context_parallel_size") or 1, arguments.get("seq_length") or 1
    return any(tokens % (2 * degree) == 0 and own % degree for degree in range(2, own))


def _recompute(arguments: Mapping[str, Any]) -> Recompute:
    granularity = arguments.get("recompute_granularity")
    if granularity is None:
        return Recompute.SELECTIVE if arguments.get("recompute_activations") else Recompute.NONE
    if granularity == Recompute.SELECTIVE:
        modules = arguments.get("recompute_modules") or ["core_attn"]
        if list(modules) != ["core_attn"]:
            raise TrainingError(f"recompute_modules {modules}: only core_attn is modelled")
    elif arguments.get("recompute_method") == "block" or (arguments.get("recompute_num_layers") or 1) != 1:
        raise TrainingError("full recomputation is modelled layer by layer: recompute_method uniform of one layer")
    return Recompute(granularity)
