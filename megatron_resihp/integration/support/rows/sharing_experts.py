# SPDX-License-Identifier: Apache-2.0
"""Rows: experts that replicas share, and what no test holds beside them. Imports `notation` and `row`."""

from collections.abc import Mapping
from typing import Any

from megatron_resihp.integration.support.notation import Rows, joined, tested
from megatron_resihp.integration.support.row import Clash, NotBeside, Rule, Rules

_ALONE = "no test covers it where replicas share experts"
_TURNS = "what documents a micro-batch has is not known where ops are run in turns"


def _sharers(values: Mapping[str, Any]) -> int:
    """How many replicas share experts."""
    degree = values["tensor_model_parallel_size"]
    members = values["expert_tensor_parallel_size"] or degree
    return int(values["expert_model_parallel_size"] * members // degree)


def _nests(values: Mapping[str, Any]) -> bool:
    """Whether of the replicas that share sequences and those that share experts, one number divides the other."""
    experts, context = _sharers(values), values["context_parallel_size"]
    return bool(max(experts, context) % max(min(experts, context), 1) == 0)


_CLASHES = (
    Clash(
        "context_parallel_size",
        lambda values: not _nests(values),
        "of the numbers of replicas that share sequences and experts, one must divide the other",
    ),
    Clash(
        "overlap_param_gather_with_optimizer_step",
        lambda values: values["overlap_param_gather_with_optimizer_step"],
        _ALONE,
    ),
    Clash(
        "ddp_average_in_collective",
        lambda values: (
            values["ddp_average_in_collective"] and values["num_experts"] and _sharers(values).bit_count() > 1
        ),
        "Megatron refuses some numbers of replicas where those that share experts are no power of two",
    ),
    Clash(
        "dataloader_inter_document_masking",
        lambda values: (  # Megatron 0.18 has none
            values.get("dataloader_inter_document_masking") and values["overlap_moe_expert_parallel_comm"]
        ),
        _TURNS,
    ),
    Clash(
        "moe_router_load_balancing_type",
        lambda values: "quantile_balancing" in values["moe_router_load_balancing_type"],
        _ALONE,
    ),
)


def _divides_stages(values: Mapping[str, Any]) -> bool:
    return bool(values["tensor_model_parallel_size"] % max(values["expert_tensor_parallel_size"], 1) == 0)


def _shares_whole_stages(values: Mapping[str, Any]) -> bool:
    """Whether those that share experts are whole stages of one replica or more."""
    sharers = values["expert_tensor_parallel_size"] * values["expert_model_parallel_size"]
    return bool(sharers % values["tensor_model_parallel_size"] == 0)


_WHOLE_STAGES = (
    Rule(
        # Megatron makes the groups all the same.
        lambda values: bool(values["num_experts"] or values["num_distributed_optimizer_instances"] == 1),
        "without experts it does nothing, which is not tested beside --num-distributed-optimizer-instances; leave one "
        "of them out",
    ),
    Rule(
        lambda values: not values["num_experts"] or _divides_stages(values),
        "plans count those that share experts by replicas; let it divide --tensor-model-parallel-size",
    ),
    Rule(
        lambda values: not values["num_experts"] or not _divides_stages(values) or _shares_whole_stages(values),
        "plans count those that share experts by replicas; let --tensor-model-parallel-size divide its product with "
        "--expert-model-parallel-size",
    ),
)


ROWS: Rows = joined(
    tested(
        "integration/test_expert_parallelism.py::test_a_death_and_the_return_of_the_worker",
        "expert_model_parallel_size",
        condition=NotBeside(_CLASHES, lambda values: values["expert_model_parallel_size"] > 1),
    ),
    tested(
        "integration/test_expert_parallelism.py::test_without_experts_their_tensor_parallel_size_does_nothing",
        "expert_tensor_parallel_size",
        condition=Rules(_WHOLE_STAGES),
    ),
)
