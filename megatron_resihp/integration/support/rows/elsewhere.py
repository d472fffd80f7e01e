# SPDX-License-Identifier: Apache-2.0
"""Rows: arguments of other kinds of jobs, which pretraining of a GPT does not read, and of other ways to survive.
Imports `notation`.
"""

from megatron_resihp.integration.support.notation import Rows, inert, joined, kernel, refused, unread, without

_ENGINE = "training.config.inference_config:InferenceSetupConfig.to_inference_config"
_RECOVERIES = "two mechanisms that recover the same job would undo each other's work"

_INFERENCE: Rows = joined(
    inert(
        _ENGINE,
        """inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_sampling_backend
        offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_logprobs_mode inference_logging_step_interval mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives inference_disable_ep_consensus
        inference_max_seq_length""",
        in_018="training.arguments:_add_inference_args",
    ),
    unread(
        "training.arguments:_add_inference_args",
        """max_tokens_to_oom output_bert_embeddings bert_embedder_type use_legacy_static_engine
        inference_max_requests inference_dynamic_batching inference_text_gen_server_logging inference_wandb_logging
        inference_coordinator_port inference_shards""",
    ),
    inert("training.arguments:validate_args", "inference_batch_times_seqlen_threshold"),
    inert(
        "core.transformer.moe.experts:InferenceGroupedMLP",
        """inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type""",
    ),
    inert(
        "core.tensor_parallel.inference_layers:InferenceRowParallelLinear",
        "inference_disable_triton_nvls_kernels",
    ),
    inert(
        "core.inference.text_generation_controllers.text_generation_controller:TextGenerationController",
        "nccl_all_reduce_for_prefill",
    ),
    refused("inference_fuse_tp_communication", "it is for inference layers", "leave it out"),
)

_REINFORCED: Rows = joined(
    refused(
        "perform_rl_step",
        "between two steps the model runs inference, in groups and schedules that no recovery knows",
        "leave --resihp out",
    ),
    refused("rl_profile", "it is for reinforcement learning, which is refused", "leave it out"),
    without(
        "perform_rl_step",
        "training.arguments:_add_rl_args",
        """rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag rl_submission_granularity
        rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta
        grpo_entropy_term_weight grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
        rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference rl_kv_cache_management_mode
        rl_persist_cuda_graphs rl_partial_rollouts rl_inference_logprobs_is_correction
        rl_importance_sampling_truncation_coef rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
        rl_training_cuda_graphs rl_inference_parsers refit_method rl_verify_model_weights_swap rl_skip_bos_token
        rl_profile_dir rl_parallel_generation_tasks rl_generation_batch_size rl_num_parallel_generations
        rl_num_parallel_generation_batches""",
    ),
    refused(
        """rl_use_sequence_packing rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle""",
        "it is for reinforcement learning, which is refused",
        "leave it out",
    ),
)

_OTHER_MODELS: Rows = joined(
    unread(
        "training.arguments:_add_biencoder_args",
        """ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load bert_load
        titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path retriever_report_topk_accuracies
        retriever_score_scaling block_data_path embedding_path indexer_batch_size indexer_log_interval""",
    ),
    unread(
        "training.arguments:_add_vision_args",
        """num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction head_lr_mult
        vision_backbone_type swin_backbone_type mask_type mask_factor iter_per_epoch dino_local_img_size
        dino_local_crops_number dino_head_hidden_size dino_bottleneck_size dino_freeze_last_layer
        dino_norm_last_layer dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs""",
    ),
    refused("vision_pretraining", "a vision model changes parameters outside of the step", "leave --resihp out"),
    without("vision_pretraining", "training.training:train_step", "vision_pretraining_type"),
    refused(
        "logits_save_dir",
        "files of logits are written by rank, and ranks change with the epoch",
        "leave --resihp out",
    ),
    without(
        "logits_save_dir",
        "training.training:setup_model_and_optimizer",
        "logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype",
    ),
    refused("logits_load_dir", "a teacher's logits are read by rank, and ranks change with the epoch"),
    without(
        "logits_load_dir",
        "training.arguments:_add_logits_distillation_args",
        """logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors""",
    ),
)

_OTHER_WAYS: Rows = joined(
    refused("inprocess_restart", _RECOVERIES),
    without(
        "inprocess_restart",
        "training.inprocess_restart:inprocess_restart",
        """inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_heartbeat_interval
        inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
        inprocess_active_world_size inprocess_empty_cuda_cache""",
    ),
    unread(
        "training.arguments:_add_inprocess_restart_args",
        "inprocess_max_iterations inprocess_progress_watchdog_interval",
    ),
    refused("enable_ft_package", _RECOVERIES),
    without("enable_ft_package", "training.ft_integration:setup", "calc_ft_timeouts ft_num_warmup_iters"),
    refused(
        "fault_injector_ranks fault_injector_num_ranks",
        "faults would strike ranks, which change with the epoch",
        "use --resihp-inject or `resihp inject`",
    ),
    without(
        "fault_injector_ranks",
        "core.fault_injector:setup_fault_injection",
        """fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds
        fault_injector_seed""",
    ),
    refused("yaml_cfg", "arguments of a file are read past the parser, where nobody checks them", "use flags"),
    kernel("training.global_vars:set_global_variables", "enable_experimental"),
)

ROWS: Rows = joined(_INFERENCE, _REINFORCED, _OTHER_MODELS, _OTHER_WAYS)
