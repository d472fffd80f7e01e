# SPDX-License-Identifier: Apache-2.0
"""Rows: sequences that replicas share, and what no test holds beside them. Imports `notation`, `row` and `cost`."""

from collections.abc import Mapping
from typing import Any

from megatron_resihp.cost.training import why_own_context
from megatron_resihp.integration.support.notation import Rows, joined, refused, tested, without
from megatron_resihp.integration.support.row import Clash, NotBeside, Together

_WAYS = {"p2p", "all_gather", "a2a", "a2a+p2p"}
_ALONE = "no test covers it where replicas share sequences"
_DOCUMENTS = "documents would be cut otherwise by each number of replicas that share a sequence"
_NOISE = "a token's noise would depend on how its sequence is cut"
_WEIGHTS = (
    "Megatron divides losses by each worker's own tokens, so that they would weigh otherwise under another one, "
    "unless --calculate-per-token-loss is given"
)

_CLASHES = (
    Clash("mtp_num_layers", lambda values: values["mtp_num_layers"], _ALONE),
    Clash(
        "hidden_dropout",
        lambda values: values["hidden_dropout"] and not why_own_context(values),
        "a token's mask would depend on how its sequence is cut",
    ),
    Clash(
        "attention_dropout",
        lambda values: values["attention_dropout"] and not why_own_context(values),
        "a token's mask would depend on how its sequence is cut",
    ),
    Clash(
        "moe_input_jitter_eps", lambda values: values["moe_input_jitter_eps"] and not why_own_context(values), _NOISE
    ),
    Clash(
        "moe_router_force_load_balancing",
        lambda values: values["moe_router_force_load_balancing"] and not why_own_context(values),
        _NOISE,
    ),
    Clash("fp16", lambda values: values["fp16"], "no test covers that the same steps overflow"),
    Clash(
        "fp8",
        lambda values: values["fp8"],
        "a tensor's scale would depend on how its sequence is cut",
    ),
    Clash(
        "dataloader_inter_document_masking",
        lambda values: values.get("dataloader_inter_document_masking"),  # Megatron 0.18 has none
        _DOCUMENTS,
    ),
    Clash("eod_mask_loss", lambda values: values["eod_mask_loss"] and not values["calculate_per_token_loss"], _WEIGHTS),
    Clash(
        "allow_ambiguous_pad_tokens",  # a tokenizer that pads with the end of documents masks these, too
        lambda values: values["allow_ambiguous_pad_tokens"] and not values["calculate_per_token_loss"],
        _WEIGHTS,
    ),
    Clash("window_size", lambda values: values["window_size"], _ALONE),
    Clash("softmax_type", lambda values: values["softmax_type"] != "vanilla", _ALONE),
    Clash("multi_latent_attention", lambda values: values["multi_latent_attention"], _ALONE),
    Clash(
        "num_distributed_optimizer_instances",
        lambda values: values["num_distributed_optimizer_instances"] > 1,
        "replicas that share sequences would be in one instance or in several, with the degree",
    ),
)


def _uses_known_ways(values: Mapping[str, Any]) -> bool:
    given = values["cp_comm_type"]
    ways = {given} if isinstance(given, str) else {*given}
    return values["context_parallel_size"] == 1 or ways <= _WAYS


ROWS: Rows = joined(
    tested(
        "integration/test_context_parallelism.py::test_a_death_and_the_return_of_the_worker",
        "context_parallel_size",
        condition=NotBeside(_CLASHES, lambda values: values["context_parallel_size"] > 1),
        device="GPU: Transformer Engine's attention; CPUs have a stand-in for it",
    ),
    tested(
        "integration/test_context_parallelism.py::test_groups_of_groups",
        "hierarchical_context_parallel_sizes",
        device="GPU: Transformer Engine's attention; CPUs have a stand-in for it",
    ),
    refused("hybrid_context_parallel", "which replicas share a sequence would depend on how long it is"),
    tested(
        "integration/test_context_parallelism.py::test_groups_of_groups",
        "cp_comm_type",
        device="GPU: Transformer Engine's attention; CPUs have a stand-in for it",
        condition=Together(_uses_known_ways, "use p2p, all_gather, a2a or a2a+p2p"),
    ),
    without(
        "hybrid_context_parallel",
        "core.datasets.data_schedule:HybridCPDataLoaderWrapper",
        "max_seqlen_per_dp_cp_rank",
    ),
)
