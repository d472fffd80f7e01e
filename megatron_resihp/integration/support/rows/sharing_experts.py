# SPDX-License-Identifier: Apache-2.0
"""Rows: experts that replicas share, and what no test holds beside them. Imports `notation` and `row`."""

from collections.abc import Mapping
from typing import Any

from megatron_resihp.integration.support.notation import Rows, joined, tested
from megatron_resihp.integration.support.row import Clash, NotBeside, Together

_ALONE = "no test holds it where replicas share experts"
_MASKS = "no test holds the masks of workers that meet in every layer"
_DOCUMENTS = "a worker waits in each layer for those with longer documents, which the detector doesn't know"

_CLASHES = (
    Clash("context_parallel_size", lambda values: values["context_parallel_size"] > 1, _ALONE),
    Clash("tensor_model_parallel_size", lambda values: values["tensor_model_parallel_size"] > 1, _ALONE),
    Clash("pipeline_model_parallel_size", lambda values: values["pipeline_model_parallel_size"] > 1, _ALONE),
    Clash("use_distributed_optimizer", lambda values: values["use_distributed_optimizer"], _ALONE),
    Clash(
        "moe_token_dispatcher_type", lambda values: values["moe_token_dispatcher_type"] != "alltoall", "use alltoall"
    ),
    Clash(
        "save",
        lambda values: values["save"],
        "no test holds that Megatron goes on from what is saved where fewer share them",
    ),
    Clash("bf16", lambda values: values["bf16"], _ALONE),
    Clash("moe_router_enable_expert_bias", lambda values: values["moe_router_enable_expert_bias"], _ALONE),
    Clash("mtp_num_layers", lambda values: values["mtp_num_layers"], _ALONE),
    Clash("hidden_dropout", lambda values: values["hidden_dropout"], _MASKS),
    Clash("attention_dropout", lambda values: values["attention_dropout"], _MASKS),
    Clash("moe_input_jitter_eps", lambda values: values["moe_input_jitter_eps"], _MASKS),
    Clash("moe_router_force_load_balancing", lambda values: values["moe_router_force_load_balancing"], _MASKS),
    Clash("fp16", lambda values: values["fp16"], "no test holds that the same steps overflow"),
    Clash("fp8", lambda values: values["fp8"], "the scales of experts' tensors don't move with the experts"),
    Clash("fp4", lambda values: values["fp4"], "the scales of experts' tensors don't move with the experts"),
    Clash("reset_position_ids", lambda values: values["reset_position_ids"], _DOCUMENTS),
    Clash(
        "dataloader_inter_document_masking",
        lambda values: values.get("dataloader_inter_document_masking"),  # Megatron 0.18 has none
        _DOCUMENTS,
    ),
    Clash(
        "moe_router_load_balancing_type",
        lambda values: "sinkhorn" in values["moe_router_load_balancing_type"],
        _ALONE,
    ),
    Clash(
        "num_distributed_optimizer_instances",
        lambda values: values["num_distributed_optimizer_instances"] > 1,
        _ALONE,
    ),
    Clash("moe_expert_capacity_factor", lambda values: values["moe_expert_capacity_factor"] is not None, _ALONE),
)


def _is_cut_as_layers_are(values: Mapping[str, Any]) -> bool:
    return bool(values["expert_tensor_parallel_size"] == values["tensor_model_parallel_size"])


ROWS: Rows = joined(
    tested(
        "integration/test_expert_parallelism.py::test_a_death_and_the_return_of_the_worker",
        "expert_model_parallel_size",
        condition=NotBeside(_CLASHES, lambda values: values["expert_model_parallel_size"] > 1),
    ),
    tested(
        "integration/test_expert_parallelism.py::test_a_death_and_the_return_of_the_worker",
        "expert_tensor_parallel_size",
        condition=Together(
            _is_cut_as_layers_are,
            "leave it out, so that experts are cut as other layers are: plans don't cut them otherwise",
        ),
    ),
)
