# SPDX-License-Identifier: Apache-2.0
"""Which of the table's arguments a release of Megatron does not have. Imports nothing.

Where an argument is lacking, its row says nothing: Megatron's own parser refuses it.
"""

from collections.abc import Mapping
from typing import Final

LACKING: Final[Mapping[str, frozenset[str]]] = {
    "0.18": frozenset(
        """
        activation_offload_fraction dataloader_inter_document_masking delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
        expert_tensor_parallel_num_weight_shards flash_attention_version freeze_all_layers
        fsdp_db_use_persist_buf_on_alloc_fail inference_cuda_graph_max_tokens
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_logprobs_mode inference_shards logits_load_decode_threads logits_load_dir
        logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
        logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
        logits_save_top_p_min_k mamba_training_ssm_states_dtype megatron_fsdp_max_pool_double_buffer
        moe_flex_dispatcher_num_sms moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_router_quantile_balancing_ema moe_routing_trace_capture_hidden_states
        moe_routing_trace_capture_logits moe_routing_trace_dump_weights moe_routing_trace_max_training_iters
        moe_routing_trace_path moe_shared_expert_glu_interleave_size mtp_detach_heads
        offset_sampling_seed_by_dp_rank override_ckpt_iteration rl_consumption_granularity rl_generation_lag
        rl_profile rl_profile_dir rl_submission_granularity stream_ckpt_dequant
        tensor_parallel_num_weight_shards use_grouped_gemm_for_shared_expert yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int yarn_original_max_position_embeddings
        """.split()
    ),
    "0.19": frozenset(
        """
        rl_generation_batch_size rl_num_parallel_generation_batches rl_num_parallel_generations
        rl_parallel_generation_tasks
        """.split()
    ),
}
"""By release, as `integration.releases` names it."""
