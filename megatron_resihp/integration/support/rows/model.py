# SPDX-License-Identifier: Apache-2.0
"""Rows: the model's size, its norms and activations, how it is initialized, multi-token prediction and hybrids.
Imports `notation` and `row`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_resihp.integration.support.notation import (
    Rows,
    all_of,
    at_start,
    inert,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import NotWith, Only, Rule, Rules, Together

_FROM_ARGUMENTS = "training.argument_utils:core_transformer_config_from_args"
_FLAGS = "integration/test_flags.py::test_a_death_and_other_degrees"
_CAPTURED = "training.arguments:_normalize_cuda_graph_modules_args"
_CONFIG = "core.transformer.transformer_config:TransformerConfig.__post_init__"


def _weighs_balance_alike(values: Mapping[str, Any]) -> bool:
    in_018 = "dataloader_inter_document_masking" not in values
    alone = values["tensor_model_parallel_size"] == values["context_parallel_size"] == 1
    return alone or not (in_018 and values["num_experts"] and values["calculate_per_token_loss"])


_SIZES: Rows = joined(
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "num_layers hidden_size num_attention_heads seq_length max_position_embeddings",
    ),
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "transformer_impl",
        condition=one_of("local", "transformer_engine", mend="use local or transformer_engine, which train"),
        device="GPU: transformer_engine; a few jobs on one H200",
    ),
    tested("integration/test_plans.py::test_kinds_of_model", "normalization add_bias_linear ffn_hidden_size"),
    tested("integration/test_plans.py::test_kinds_of_model", "untie_embeddings_and_output_weights swiglu"),
    tested(
        "integration/test_query_groups.py::test_from_plan_to_plan_and_back",
        "make_vocab_size_divisible_by",
    ),
    refused("spec", "a script's own layers may have state and groups of any kind"),
    refused(
        "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
        "layers of different shapes can't be told apart in a plan's costs, and none has been tried",
    ),
    refused("decoder_seq_length", "an encoder's and a decoder's messages have different lengths", "use --seq-length"),
)

_PARTS: Rows = joined(
    kernel(
        "core.transformer.transformer_layer:TransformerLayer._forward_attention",
        "bias_dropout_fusion",
    ),
    tested("integration/test_random_streams.py::test_a_death", "hidden_dropout attention_dropout"),
    unread("core.transformer.transformer_config:TransformerConfig", "apply_residual_connection_post_layernorm"),
    kernel("core.transformer.transformer_layer:TransformerLayer", "layernorm_epsilon"),
    kernel("core.fusions.fused_layer_norm:FusedLayerNorm", "layernorm_zero_centered_gamma"),
    kernel(_FROM_ARGUMENTS, "no_persist_layer_norm bias_gelu_fusion bias_swiglu_fusion squared_relu"),
    tested(
        _FLAGS,
        "quick_geglu glu_linear_offset activation_func_clamp_value",
    ),
    kernel(
        _CONFIG,
        "use_te_activation_func",
        device="GPU: Transformer Engine's activations; not with --transformer-impl local",
    ),
    tested(
        "integration/test_fused_experts.py::test_a_death_and_the_return_of_the_worker",
        "use_transformer_engine_op_fuser",
        device="GPU: Transformer Engine's ops; none has been tried",
        condition=NotWith(
            "overlap_param_gather",
            "Megatron's fused MLPs take over hooks as they are in the first forward pass, and those that wait for "
            "parameters are off then",
        ),
    ),
    refused("fused_residual_rmsnorm", "it replaces layers by ones whose parameters no test on CPUs can have"),
    tested(
        _FLAGS,
        "mlp_chunks_for_training",
        condition=Together(
            lambda given: (
                given["mlp_chunks_for_training"] == 1
                or not (given["num_experts"] or given["transformer_impl"] == "transformer_engine")
            ),
            "leave it out with experts, where a chunk's tokens are weighed against each other and other plans have "
            "others, and with --transformer-impl transformer_engine, whose first chunk overwrites the other chunks' "
            "gradients in the first iteration after each recovery, as at the start of a job without --resihp",
        ),
    ),
    inert("core.transformer.transformer_layer:TransformerLayer._forward_mlp", "mlp_chunks_for_prefill"),
    kernel(
        "core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward",
        "clone_scatter_output_in_embedding",
    ),
    kernel("core.models.common.language_module.language_module:LanguageModule", "cross_entropy_loss_fusion"),
    kernel(
        "core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
        "cross_entropy_fusion_impl",
        device="GPU: 'te' needs Transformer Engine",
    ),
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "calculate_per_token_loss",
        condition=Together(
            _weighs_balance_alike,
            "Megatron 0.18 weighs the losses that balance experts by the tokens of one worker, which other degrees "
            "change; use 0.19, or leave the flag out",
        ),
    ),
    kernel(
        "core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication",
        "gradient_accumulation_fusion",
        device="GPU: unless it is given, the head needs Apex, also with Transformer Engine",
    ),
    unread("training.arguments:_add_network_size_args", "onnx_safe bert_binary_head openai_gelu"),
    inert("training.arguments:validate_args", "deprecated_use_mcore_models"),
)

_INITIAL: Rows = joined(
    at_start(
        "core.tensor_parallel.layers:ColumnParallelLinear",
        "perform_initialization use_cpu_initialization",
    ),
    at_start(_CONFIG, "init_method_std embedding_init_method_std"),
    at_start(_FROM_ARGUMENTS, "init_method_xavier_uniform"),
    tested(
        _FLAGS,
        "use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power",
    ),
    inert(_CONFIG, "mup_width_mult"),
)

_RECOMPUTED: Rows = joined(
    tested(
        "integration/test_plans.py::test_orders_of_ops",
        "recompute_granularity recompute_method recompute_num_layers",
    ),
    kernel("training.arguments:validate_args", "recompute_activations"),
    tested(
        _FLAGS,
        "recompute_modules",
        condition=all_of(
            "core_attn",
            "mlp",
            "moe",
            "shared_experts",
            "layernorm",
            "mla_up_proj",
            "moe_act",
            mend="no test covers gdn_norm_out; recompute other modules",
        ),
        device="GPU: moe_act is of Transformer Engine's grouped layers",
    ),
    tested(_FLAGS, "distribute_saved_activations"),
    refused("checkpoint_activations", "Megatron no longer takes it", "use --recompute-activations"),
    refused("moe_layer_recompute", "Megatron has removed it", "use --recompute-granularity selective"),
    refused(
        "fine_grained_activation_offloading",
        "its buffers follow the order of Megatron's own schedule, and other plans have other orders",
        "leave it out, or recompute with --recompute-granularity",
    ),
    without(
        "fine_grained_activation_offloading",
        "core.models.gpt.gpt_model:GPTModel.preprocess_for_fine_grained_offloading",
        """min_offloaded_tensor_size delta_offload_bytes_across_pp_ranks activation_offload_fraction
        fine_grained_offloading_max_inflight_offloads""",
    ),
    without("fine_grained_activation_offloading", _CONFIG, "offload_modules"),
    without(
        "fine_grained_activation_offloading",
        "core.transformer.transformer_layer:TransformerLayer",
        "delay_offload_until_cuda_graph",
    ),
    refused(
        "cpu_offloading_num_layers",
        "Megatron has it for a single pipeline stage, and a recovery may need more",
        "leave it out, or recompute with --recompute-granularity",
    ),
    without(
        "cpu_offloading_num_layers",
        "core.transformer.transformer_block:TransformerBlock",
        "cpu_offloading_retain_pinned_cpu_buffers",
    ),
)

_NO_ITERATION = Only(
    lambda given: "full_iteration" not in (given or ()),
    "leave full_iteration out, for which Megatron captures graphs without --cuda-graph-impl",
)

_GRAPHS: Rows = joined(
    refused(
        "enable_cuda_graph external_cuda_graph cuda_graph_impl",
        "graphs hold the groups and buffers of the epoch in which they were captured",
    ),
    without("cuda_graph_impl", "training.training:train", "cuda_graph_warmup_steps"),
    without("cuda_graph_impl", _CAPTURED, "inference_cuda_graph_scope"),
    without("cuda_graph_impl", _CAPTURED, "cuda_graph_modules", condition=_NO_ITERATION),
    without(
        "cuda_graph_impl", "training.arguments:validate_args", "cuda_graph_scope_deprecated", condition=_NO_ITERATION
    ),
)


def _if_it_predicts(holds: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], bool]:
    return lambda values: not values["mtp_num_layers"] or bool(holds(values))


def _predicts_in_the_heads_chunk(values: Mapping[str, Any]) -> bool:
    *before, _ = str(values["pipeline_model_parallel_layout"] or "").rsplit("|", 1)
    return "m" not in "".join(before)


_WITH_THE_HEAD = Rules((
    Rule(
        lambda values: values["mtp_num_layers"] != 0,
        "leave it out in place of 0, with which Megatron builds the last norm elsewhere",
    ),
    Rule(
        _if_it_predicts(lambda values: values["untie_embeddings_and_output_weights"]),
        "use --untie-embeddings-and-output-weights, as Megatron gives a head that shares its weights others, too, "
        "which nothing uses",
    ),
    Rule(
        _if_it_predicts(_predicts_in_the_heads_chunk),
        "let m and L be in the same chunk of --pipeline-model-parallel-layout",
    ),
    Rule(
        _if_it_predicts(lambda values: not values["defer_embedding_wgrad_compute"]),
        "leave --defer-embedding-wgrad-compute out, which no test covers with it",
    ),
    Rule(
        _if_it_predicts(lambda values: not values.get("dataloader_inter_document_masking")),  # Megatron 0.18 has none
        "leave --dataloader-inter-document-masking out, which no test covers with it",
    ),
))  # fmt: skip
"""All layers that predict further tokens are in the head's chunk, and the head has weights of its own."""


_PREDICTING: Rows = joined(
    tested(
        "integration/test_predictions.py::test_deaths_and_plans_and_back",
        "mtp_num_layers",
        condition=_WITH_THE_HEAD,
    ),
    tested("integration/test_predictions.py::test_deaths_and_plans_and_back", "mtp_loss_scaling_factor"),
    refused(
        "mtp_use_repeated_layer",
        "random streams and costs take each prediction for a layer of its own",
        "leave it out, and each further token is predicted by a layer of its own",
    ),
    refused(
        "mtp_detach_heads",
        "gradients of predictions are clipped by a norm of their own, and a step is agreed on with one norm",
    ),
)

_HYBRIDS: Rows = joined(
    refused(
        "hybrid_layer_pattern hybrid_override_pattern mtp_hybrid_override_pattern is_hybrid_model",
        "Mamba's kernels need a GPU, and no test covers how their parameters are cut",
    ),
    without(
        "hybrid_layer_pattern",
        "core.ssm.mamba_mixer:MambaMixer",
        """mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        mamba_training_ssm_states_dtype""",
    ),
)

ROWS: Rows = joined(_SIZES, _PARTS, _INITIAL, _RECOMPUTED, _GRAPHS, _PREDICTING, _HYBRIDS)
