# SPDX-License-Identifier: Apache-2.0
"""What has to be the same on all workers of a job: every argument that is not named here. Imports nothing."""

MAY_DIFFER: frozenset[str] = frozenset(
    """
    data_cache_path nccl_communicator_config_path wandb_save_dir

    log_throughput logging_level timing_log_option log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
    log_memory_to_tensorboard log_world_size_to_tensorboard tensorboard_queue_size wandb_entity wandb_exp_name

    num_workers num_dataset_builder_threads mmap_bin_files

    distributed_timeout_minutes manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level

    async_ckpt_cpu_priority async_ckpt_io_priority dist_ckpt_workers exit_signal_handler exit_signal
    use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated
    """.split()
)
"""Arguments that change nothing of what a worker computes, nor when it waits for others: where it keeps what it makes,
what it tells, which process reads its data, how long it waits, when it cleans up."""

IN_STEP: frozenset[str] = frozenset(
    """
    log_interval log_progress log_timers_to_tensorboard tensorboard_dir tensorboard_log_interval wandb_project

    exit_duration_in_mins
    """.split()
)
"""Arguments that change nothing but in which iterations all workers meet to log, which they look up each time, what is
logged by whoever logs, and when the job ends: a worker that was started with others takes the job's."""

AT_START: frozenset[str] = frozenset(
    """
    load pretrained_checkpoint ckpt_step finetune exit_on_missing_checkpoint auto_detect_ckpt_format no_load_optim
    no_load_rng ckpt_fully_parallel_load dist_ckpt_strictness use_checkpoint_opt_param_scheduler
    override_opt_param_scheduler

    load_main_params_from_ckpt override_ckpt_iteration use_checkpoint_args use_mp_args_from_checkpoint_args
    use_tokenizer_model_from_checkpoint_args ckpt_fully_parallel_load_process_group
    ckpt_fully_parallel_load_exchange_algo ckpt_load_validate_sharding_integrity strict_fsdp_dtensor_load
    stream_ckpt_dequant
    """.split()
)
"""Arguments of loading, which a later worker does not do. So are our own flags, but for a few: they are for the
coordinator, which has those of the job's first worker."""

OWN_ALWAYS: frozenset[str] = frozenset(
    {"resihp_carrier", "resihp_emulate", "resihp_record_samples", "resihp_record_digests"}
)
"""Our own flags that each worker follows."""

IF_GIVEN: frozenset[str] = frozenset(
    {"save", "load", "pretrained_checkpoint", "non_persistent_global_ckpt_dir", "resihp_cost_model"}
)
"""Paths of which only counts whether there is one: all workers save together."""

DATA: frozenset[str] = frozenset(
    "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path".split()
)
"""Prefixes of data sets, and weights, or files with such; what the data sets hold is compared."""

BY_CONTENT: frozenset[str] = frozenset({"vocab_file", "merge_file", "tokenizer_model"})
"""Files, directories or names, of which what is there is compared."""
