# SPDX-License-Identifier: Apache-2.0
"""Rows: attention of all kinds, and how positions are told. Imports `notation`."""

from megatron_resihp.integration.support.notation import (
    Rows,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import Together

_ATTENTION = "core.transformer.dot_product_attention:DotProductAttention"
_ROTARY = "core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_YARN = "core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding"
_FLAGS = "integration/test_flags.py::test_a_death_and_other_degrees"
_CLIPPED = "integration/test_attention_logits.py::test_a_death_and_other_degrees"
_INDEXER = "core.transformer.experimental_attention_variant.dsa:DSAttention"

_HEADS: Rows = joined(
    tested(
        "integration/test_query_groups.py::test_from_plan_to_plan_and_back",
        "group_query_attention num_query_groups qk_layernorm",
    ),
    tested(_FLAGS, "kv_channels add_qkv_bias qk_l2_norm attention_output_gate"),
    kernel(_ATTENTION, "apply_query_key_layer_scaling"),
    kernel(_ATTENTION, "attention_softmax_in_fp32 masked_softmax_fusion"),
    tested(_FLAGS, "softmax_type", device="GPU: Transformer Engine's attention for packed documents"),
    tested(_FLAGS, "window_size window_attn_skip_freq"),
    kernel(
        "core.models.common.language_module.language_module:LanguageModule._set_attention_backend",
        "attention_backend flash_attention_version",
        device="GPU: Transformer Engine's attention; CPUs run the unfused one",
    ),
    unread("training.arguments:_add_training_args", "use_flash_attn", in_018="training.arguments:validate_args"),
    kernel(
        "training.initialize:initialize_megatron",
        "batch_invariant_mode",
        device="GPU: FlashAttention 3",
    ),
    tested(
        _CLIPPED,
        "qk_clip",
        device="GPU: Transformer Engine tells of logits",
        condition=Together(
            lambda given: (
                not given["qk_clip"]
                or not (
                    given["use_distributed_optimizer"]
                    or given["optimizer"] == "dist_muon"
                    or given["attention_output_gate"]
                )
            ),
            "leave out a distributed optimizer, of whose masters Megatron clips a part as if it were the whole, and "
            "--attention-output-gate, whose rows it takes for others",
        ),
    ),
    tested(_CLIPPED, "qk_clip_alpha qk_clip_threshold"),
    refused("use_kitchen_attention", "its kernels are in a library that is not public"),
    without(
        "use_kitchen_attention",
        "core.models.gpt.gpt_layer_specs:get_gpt_decoder_layer_specs",
        "kitchen_attention_backend",
    ),
    refused("flash_decode", "it is for inference", "leave it out"),
)

_POSITIONS: Rows = joined(
    tested(
        "integration/test_plans.py::test_kinds_of_model",
        "position_embedding_type",
        condition=one_of(
            "learned_absolute",
            "rope",
            "yarn",
            "none",
            mend="use rope, yarn, learned_absolute or none",
        ),
    ),
    kernel("training.arguments:validate_args", "add_position_embedding use_rotary_position_embeddings"),
    kernel(_ROTARY, "rotary_base rotary_percent rotary_interleaved"),
    kernel(
        "training.argument_utils:gpt_config_from_args",
        "rotary_seq_len_interpolation_factor",
        in_018="training.argument_utils:hybrid_config_from_args",
    ),
    tested(_FLAGS, "use_rope_scaling rope_scaling_factor no_rope_freq"),
    kernel("core.models.common.embeddings.rope_utils:apply_rotary_pos_emb", "apply_rope_fusion"),
    kernel(
        "core.models.gpt.gpt_model:GPTModel",
        """yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int""",
    ),
    kernel(_YARN, "mscale mscale_all_dim"),
    tested(_FLAGS, "rotary_scaling_factor"),
    without("position_embedding_type=mrope", "core.models.gpt.gpt_model:GPTModel", "mrope_section"),
    without(
        "position_embedding_type=relative",
        "core.models.common.embeddings.relative_pos_embedding:RelativePositionEmbedding",
        "relative_attention_num_buckets relative_attention_max_distance",
    ),
)

_COMPRESSED: Rows = joined(
    tested(
        _FLAGS,
        "multi_latent_attention",
        condition=Together(
            lambda given: (
                not given["multi_latent_attention"]
                or given["sequence_parallel"]
                or given["tensor_model_parallel_size"] == 1
            ),
            "with tensor parallelism it needs --sequence-parallel, without which Megatron doesn't sum gradients of "
            "what members share",
        ),
    ),
    tested(_FLAGS, "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"),
    kernel("core.transformer.multi_latent_attention:MultiLatentAttention", "rope_type"),
    refused("cache_mla_latents", "Megatron has it for inference only", "leave it out"),
    refused("mla_down_proj_fusion", "it joins projections to one that no test on CPUs can have"),
)

_VARIANTS: Rows = joined(
    tested(
        _FLAGS,
        "experimental_attention_variant",
        condition=Together(
            lambda given: (
                given["experimental_attention_variant"] == "gated_delta_net"
                and given["context_parallel_size"] == 1
                and (given["sequence_parallel"] or given["tensor_model_parallel_size"] == 1)
            ),
            "use gated_delta_net, as dsa's indexer has a loss of its own, which is logged by sums in groups that"
            " heterogeneous plans don't have, and use it without context parallelism; with tensor"
            " parallelism add --sequence-parallel, or Megatron doesn't sum the gradients of its output norms",
        ),
    ),
    tested(
        _FLAGS,
        """linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads""",
    ),
    without(
        "experimental_attention_variant=dsa",
        _INDEXER,
        """dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32""",
    ),
    without(
        "experimental_attention_variant=dsa",
        "core.transformer.experimental_attention_variant.dsa_kernels:_get_dsa_kernel_backend",
        "dsa_kernel_backend",
    ),
)

ROWS: Rows = joined(_HEADS, _POSITIONS, _COMPRESSED, _VARIANTS)
