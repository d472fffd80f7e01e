# SPDX-License-Identifier: Apache-2.0
"""What of Megatron is known to work with --resihp: an allow-list, held by tests. Imports nothing.

A flag that differs from Megatron's default and is not listed is refused at start-up by name: it may change state,
groups or the schedule in a way that recovery does not know.
"""

from collections.abc import Callable, Mapping
from typing import Any

ALLOWED: frozenset[str] = frozenset(
    """
    tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel perform_initialization
    use_cpu_initialization bf16 deterministic_mode num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split hidden_size num_attention_heads attention_backend num_query_groups
    ffn_hidden_size kv_channels hidden_dropout attention_dropout fp32_residual_connection
    apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear
    add_qkv_bias rotary_interleaved normalization qk_layernorm calculate_per_token_loss init_method_std
    embedding_init_method_std apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul
    recompute_granularity recompute_method recompute_num_layers transformer_impl cross_entropy_loss_fusion
    cross_entropy_fusion_impl

    group_query_attention max_position_embeddings position_embedding_type use_rotary_position_embeddings rotary_base
    rotary_percent rotary_seq_len_interpolation_factor add_position_embedding make_vocab_size_divisible_by
    openai_gelu squared_relu swiglu untie_embeddings_and_output_weights

    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_load_balancing_type moe_router_dtype moe_router_score_function
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_aux_loss_coeff moe_z_loss_coeff moe_token_dispatcher_type

    weight_decay clip_grad adam_beta1 adam_beta2 adam_eps

    micro_batch_size global_batch_size empty_unused_memory_level train_sync_interval train_iters train_samples
    exit_interval manual_gc manual_gc_interval manual_gc_eval check_for_nan_in_loss_and_grad masked_softmax_fusion
    bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion use_flash_attn optimizer dataloader_type
    no_persist_layer_norm gradient_accumulation_fusion recompute_activations

    seed te_rng_tracker init_method_xavier_uniform

    lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
    lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay weight_decay_incr_style lr min_lr

    save save_interval load finetune pretrained_checkpoint ckpt_step exit_on_missing_checkpoint ckpt_format
    auto_detect_ckpt_format ckpt_fully_parallel_save ckpt_fully_parallel_load no_save_optim no_save_rng no_load_optim
    no_load_rng dist_ckpt_strictness dist_ckpt_optim_fully_reshardable

    grad_reduce_in_bf16 attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32

    fp16 loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis

    distributed_backend distributed_timeout_minutes local_rank use_tp_pp_dp_mapping use_gloo_process_groups
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    overlap_p2p_comm overlap_grad_reduce align_grad_reduce ddp_num_buckets ddp_bucket_size disable_jit_fuser
    nccl_communicator_config_path use_distributed_optimizer

    eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size

    data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
    data_cache_path mmap_bin_files mock_data seq_length encoder_seq_length num_workers reset_position_ids
    reset_attention_mask dataloader_inter_document_masking eod_mask_loss create_attention_mask_in_dataloader
    num_dataset_builder_threads

    vocab_size padded_vocab_size pad_vocab_size vocab_file merge_file vocab_extra_ids tokenizer_type tokenizer_model
    special_tokens tiktoken_pattern tiktoken_num_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id

    log_interval log_throughput log_progress timing_log_level timing_log_option log_timers_to_tensorboard
    log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard logging_level
    barrier_with_L1_time log_world_size_to_tensorboard

    rerun_mode check_for_spiky_loss

    deprecated_use_mcore_models

    tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_params_norm log_num_zeros_in_grad
    log_memory_interval log_device_memory_used log_energy
    wandb_project wandb_exp_name wandb_entity wandb_save_dir
    enable_one_logger one_logger_project one_logger_run_name one_logger_async
    profile use_pytorch_profiler pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
    pytorch_profiler_collect_chakra profile_ranks profile_step_start profile_step_end nvtx_ranges record_shapes
    record_memory_history memory_snapshot_path
    log_straggler straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
    """.split()
)

CONSTRAINTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dataloader_type": (lambda value: value in (None, "single"), "only 'single' keeps its samples through a change"),
    "moe_router_load_balancing_type": (
        lambda value: set([value] if isinstance(value, str) else value) <= {"aux_loss", "seq_aux_loss", "none"},
        "use aux_loss, seq_aux_loss or none, which look at one micro-batch at a time",
    ),
    "moe_token_dispatcher_type": (lambda value: value in ("allgather", "alltoall"), "use allgather or alltoall"),
    "optimizer": (lambda value: value == "adam", "only adam's state is known to move"),
    "ckpt_format": (lambda value: value in ("torch", "torch_dist"), "use torch or torch_dist"),
    "rerun_mode": (
        lambda value: value in ("disabled", "validate_results"),
        "use disabled or validate_results",
    ),
    "log_straggler": (
        lambda value: not value,
        "leave it out: the plugin itself looks for slow workers, and this one keeps to the ranks of the start",
    ),
    "distributed_backend": (lambda value: value in ("nccl", "gloo"), "use nccl or gloo"),
}
"""Allowed only with some values: a test, and what to do instead."""

NEEDS: Mapping[str, tuple[str, str]] = {
    "fp16": (
        "accumulate_allreduce_grads_in_fp32",
        "sums in half precision overflow in other iterations when another plan makes other sums",
    ),
}
"""Allowed only together with another flag: which, and why."""

# ---- what has to be the same on all workers of a job: whatever is not named here

MAY_DIFFER: frozenset[str] = frozenset(
    """
    data_cache_path nccl_communicator_config_path wandb_save_dir

    log_throughput logging_level timing_log_option log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
    log_memory_to_tensorboard log_world_size_to_tensorboard tensorboard_queue_size wandb_entity wandb_exp_name

    num_workers num_dataset_builder_threads mmap_bin_files

    distributed_timeout_minutes manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level
    """.split()
)
"""Arguments that change nothing of what a worker computes, nor when it waits for others: where it keeps what it makes,
what it tells, which process reads its data, how long it waits, when it cleans up."""

IN_STEP: frozenset[str] = frozenset(
    """
    log_interval log_progress log_timers_to_tensorboard tensorboard_dir tensorboard_log_interval wandb_project
    """.split()
)
"""Arguments that change nothing but in which iterations all workers meet to log, which they look up each time, and what
is logged by whoever logs: a worker that was started with others takes the job's."""

AT_START: frozenset[str] = frozenset(
    """
    load pretrained_checkpoint ckpt_step finetune exit_on_missing_checkpoint auto_detect_ckpt_format no_load_optim
    no_load_rng ckpt_fully_parallel_load dist_ckpt_strictness use_checkpoint_opt_param_scheduler
    override_opt_param_scheduler
    """.split()
)
"""Arguments of loading, which a later worker does not do. So are our own flags, but for a few: they are for the
coordinator, which has those of the job's first worker."""

OWN_ALWAYS: frozenset[str] = frozenset({"resihp_emulate", "resihp_record_samples", "resihp_record_digests"})
"""Our own flags that each worker follows."""

IF_GIVEN: frozenset[str] = frozenset({"save", "load", "pretrained_checkpoint", "resihp_cost_model"})
"""Paths of which only counts whether there is one: all workers save together."""

DATA: frozenset[str] = frozenset(
    "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path".split()
)
"""Prefixes of data sets, and weights, or files with such; what the data sets hold is compared."""

BY_CONTENT: frozenset[str] = frozenset({"vocab_file", "merge_file", "tokenizer_model"})
"""Files, directories or names, of which what is there is compared."""


def refusals(values: Mapping[str, Any], defaults: Mapping[str, Any], flags: Mapping[str, str]) -> list[str]:
    """One line for each argument that is not known to work.

    Args:
        values: the arguments as parsed, before Megatron derives others from them.
        defaults: Megatron's defaults.
        flags: how each argument is spelled on the command line.
    """
    lines = []
    for name, default in sorted(defaults.items()):
        value = values.get(name, default)
        if name in CONSTRAINTS:
            accepts, mend = CONSTRAINTS[name]
            if not accepts(value):
                lines.append(f"{flags[name]} {value} is not supported with --resihp: {mend}")
        if value != default and name not in ALLOWED:
            lines.append(f"{flags[name]} is not known to work with --resihp; leave one of the two out")
        if value != default and name in NEEDS:
            needed, why = NEEDS[name]
            if not values[needed]:
                lines.append(f"{flags[name]} is only supported with {flags[needed]} with --resihp: {why}")
    return lines
