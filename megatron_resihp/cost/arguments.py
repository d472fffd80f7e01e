# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments that determine costs; workers report them to a planner. Imports the standard library."""

from typing import Final

ARGUMENTS: Final = (
    "add_bias_linear", "add_qkv_bias", "attention_backend", "attention_dropout", "attention_output_gate",
    "distributed_backend", "experimental_attention_variant", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "ffn_hidden_size", "group_query_attention", "hidden_dropout", "hidden_size", "kv_channels", "kv_lora_rank",
    "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_value_head_dim",
    "make_vocab_size_divisible_by", "max_position_embeddings", "moe_ffn_hidden_size", "moe_layer_freq",
    "moe_router_topk", "moe_shared_expert_gate", "moe_shared_expert_intermediate_size", "multi_latent_attention",
    "normalization", "num_attention_heads", "num_experts", "num_layers", "num_query_groups", "padded_vocab_size",
    "position_embedding_type", "q_lora_rank", "qk_head_dim", "qk_layernorm", "qk_pos_emb_head_dim", "quick_geglu",
    "swiglu", "tensor_model_parallel_size", "untie_embeddings_and_output_weights", "v_head_dim", "vocab_size",
    "accumulate_allreduce_grads_in_fp32", "bf16", "defer_embedding_wgrad_compute", "fp16", "fp8",
    "fp8_recipe", "grad_reduce_in_bf16",
    "micro_batch_size", "mtp_num_layers", "optimizer",
    "num_distributed_optimizer_instances", "recompute_activations", "recompute_granularity", "recompute_method",
    "recompute_modules", "recompute_num_layers", "seq_length", "sequence_parallel", "transformer_impl",
    "use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "use_transformer_engine_op_fuser",
    "wgrad_deferral_limit",
)  # fmt: skip
"""Megatron's arguments on which work and memory depend, among those known to work with the plugin."""
