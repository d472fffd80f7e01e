# SPDX-License-Identifier: Apache-2.0
"""Rows: mixtures of experts. Imports `notation`, `row`."""

from collections.abc import Mapping
from typing import Any

from megatron_resihp.integration.support.notation import (
    Rows,
    inert,
    joined,
    kernel,
    refused,
    tested,
    without,
)
from megatron_resihp.integration.support.row import NotWith, Together

_BALANCE = "integration/test_plans.py::test_mixtures_of_experts_tell_of_their_balance"
_ROUTING = "core.transformer.moe.router:TopKRouter.routing"
_CONFIG = "core.transformer.transformer_config:TransformerConfig.__post_init__"
_FLEX = "moe_token_dispatcher_type=flex"
_PARTS = "integration/test_router_parts.py::test_a_death_and_other_degrees"
_BIASES = "integration/test_expert_biases.py::test_a_death_and_other_degrees"
_QUANTILES = "integration/test_expert_biases.py::test_biases_that_follow_quantiles"
_NOISE = "integration/test_random_streams.py::test_a_death"


def _weighs_alike(values: Mapping[str, Any]) -> bool:
    given = values["moe_router_load_balancing_type"]
    kinds = {given} if isinstance(given, str) else set(given or ())
    return kinds <= {"aux_loss", "seq_aux_loss", "none", "sinkhorn", "quantile_balancing"}


_LAYERS: Rows = joined(
    tested(
        _BALANCE,
        "num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size",
    ),
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "moe_shared_expert_gate"),
    tested(
        "integration/test_uneven_experts.py::test_deaths_where_memory_holds_no_equal_numbers",
        "moe_grouped_gemm",
        device="GPU: Transformer Engine's grouped products; CPUs compute those of one expert after another",
    ),
    kernel("core.transformer.moe.experts:SequentialMLP.forward", "moe_apply_probs_on_input"),
    kernel(
        "core.transformer.moe.experts:TEGroupedMLP.forward",
        "use_fused_weighted_squared_relu",
        device="GPU: --moe-grouped-gemm with Transformer Engine",
    ),
    refused(
        "moe_single_grouped_weight moe_single_grouped_bias",
        "all experts' weights in one parameter are cut in a way that slices of state don't know",
    ),
    refused(
        "moe_mlp_glu_interleave_size",
        "gates and up-projections that alternate in blocks are cut in a way that slices of state don't know",
    ),
    refused(
        "use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp",
        "it replaces layers by ones whose parameters no test on CPUs can have",
    ),
    without(
        "use_grouped_gemm_for_shared_expert",
        "core.transformer.moe.shared_experts:FusedSharedExpertMLP",
        "moe_shared_expert_glu_interleave_size",
    ),
    tested("integration/test_shared_experts.py::test_a_death_and_other_degrees", "moe_shared_expert_overlap"),
    refused(
        "moe_latent_size",
        "the projections to latents are Transformer Engine's layers, and no test on CPUs covers how they are cut",
    ),
    refused("moe_use_upcycling", "it makes the model from another one at the start, which joining workers can't"),
    without("moe_use_upcycling", "training.training:setup_model_and_optimizer", "moe_upcycling_granularity"),
)

_ROUTER: Rows = joined(
    tested(
        _BALANCE,
        "moe_router_load_balancing_type",
        condition=Together(
            _weighs_alike,
            "use aux_loss, seq_aux_loss, quantile_balancing, sinkhorn or none, which weigh a micro-batch alike in any "
            "plan",
        ),
    ),
    tested(_BALANCE, "moe_router_topk moe_aux_loss_coeff moe_z_loss_coeff"),
    kernel(
        _ROUTING,
        """moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function""",
    ),
    kernel("core.transformer.moe.router:Router.gating", "moe_router_dtype"),
    kernel(_ROUTING, "moe_router_fusion", device="GPU: Transformer Engine's router"),
    tested(_BIASES, "moe_router_enable_expert_bias moe_router_bias_update_rate"),
    tested(_QUANTILES, "moe_router_quantile_balancing_ema"),
    tested(_NOISE, "moe_router_force_load_balancing moe_input_jitter_eps"),
    refused("moe_router_force_biased", "a worker keeps what it drew first, which one in its place would draw again"),
    tested(_PARTS, "moe_expert_capacity_factor moe_token_drop_policy"),
    tested(
        _PARTS,
        "moe_pad_expert_input_to_capacity",
        condition=NotWith(
            "moe_router_enable_expert_bias",
            "padding counts as tokens, and stages of another degree than the job's own have none",
        ),
    ),
    refused("moe_enable_routing_replay", "what is replayed belongs to the micro-batches of one worker"),
    refused(
        "moe_router_padding_for_quantization moe_router_padding_for_fp8",
        "it routes more tokens than there are, and no test covers what the experts' balance then counts",
        "leave it out",
    ),
    inert("core.transformer.transformer_config:TransformerConfig", "moe_pad_experts_for_cuda_graph_inference"),
    refused(
        "moe_routing_trace_path",
        "the file of a worker's routing would go on with another worker's micro-batches",
    ),
    without(
        "moe_routing_trace_path",
        "training.training:train",
        """moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights""",
    ),
)

_DISPATCH: Rows = joined(
    tested(
        _BALANCE,
        "moe_token_dispatcher_type",
        condition=Together(
            lambda values: (
                values["moe_token_dispatcher_type"] in ("allgather", "alltoall") or not values["num_experts"]
            ),
            "flex needs kernels of GPUs, with which no death has been tried; use allgather or alltoall",
        ),
    ),
    kernel(
        "core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        "moe_permute_fusion",
        device="GPU: Transformer Engine's permutation",
    ),
    without(
        _FLEX,
        "core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher",
        """moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs
        moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape
        moe_ncclep_zero_copy""",
    ),
    without(_FLEX, _CONFIG, "moe_deepep_num_sms moe_hybridep_num_sms"),
    refused("moe_enable_deepep", "Megatron has it for the flex dispatcher only, which is refused", "use alltoall"),
    refused(
        "moe_expert_rank_capacity_factor",
        "Megatron has it for the flex dispatcher only, which is refused",
        "leave it out: no token is dropped",
    ),
    refused("moe_paged_stash", "its pages follow the order of Megatron's own schedule, and other plans have others"),
    without(
        "moe_paged_stash",
        "core.transformer.moe.paged_stash:paged_stash_reset",
        """moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu""",
    ),
)

ROWS: Rows = joined(_LAYERS, _ROUTER, _DISPATCH)
