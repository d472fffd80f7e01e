# SPDX-License-Identifier: Apache-2.0
"""Rows: what a job tells, to whom, and profiling. Imports `notation`."""

from megatron_resihp.integration.support.notation import Rows, inert, joined, refused, tested

_WRITER = "Megatron opens it once, on its last rank, which may die and changes with the epoch"
_SUMMED = "it is summed in groups that unlike replicas don't have"
_PROFILER = "a profile is of one rank, and ranks change with the epoch"
_SWITCHED = "it starts a server or a measurement once, for ranks that change with the epoch"
_LOG = "training.training:training_log"

_LOGGED: Rows = joined(
    tested("integration/test_log_lines.py::test_losses_of_an_interval", "log_interval"),
    tested("integration/test_plan_failures.py::test_a_worker_without_work_sees_no_documents", "log_progress"),
    inert(_LOG, "log_throughput log_timers_to_tensorboard log_loss_scale_to_tensorboard"),
    inert(_LOG, "log_memory_to_tensorboard log_world_size_to_tensorboard"),
    inert("training.training:evaluate_and_print_results", "log_validation_ppl_to_tensorboard"),
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "timing_log_level"),
    inert("training.global_vars:_set_timers", "timing_log_option"),
    inert("training.training:train_step", "barrier_with_L1_time"),
    inert("training.initialize:setup_logging", "logging_level"),
    refused("log_params_norm", _SUMMED),
    refused("log_num_zeros_in_grad", _SUMMED),
    refused("log_memory_interval", _SUMMED),
    refused("log_device_memory_used", "it belongs to --log-memory-interval, which is refused", "leave it out"),
    refused("log_max_attention_logit", _SUMMED),
    refused("log_energy", _SUMMED),
    refused("moe_per_layer_logging", "a layer's balance is summed in groups that unlike replicas don't have"),
)

_WRITERS: Rows = joined(
    refused("tensorboard_dir", _WRITER),
    refused("tensorboard_log_interval", _WRITER),
    refused("tensorboard_queue_size", _WRITER),
    refused("wandb_project", _WRITER),
    refused("wandb_exp_name", _WRITER),
    refused("wandb_save_dir", _WRITER),
    refused("wandb_entity", _WRITER),
    refused("enable_one_logger", _WRITER),
    refused("one_logger_project", _WRITER),
    refused("one_logger_run_name", _WRITER),
    refused("one_logger_async", _WRITER),
    refused("app_tag_run_name", _WRITER),
    refused("app_tag_run_version", _WRITER),
    refused("config_logger_dir", "each epoch makes the objects anew, and would write a file for each again"),
)

_PROFILES: Rows = joined(
    refused("profile", _PROFILER),
    refused("profile_step_start", _PROFILER),
    refused("profile_step_end", _PROFILER),
    refused("profile_ranks", _PROFILER),
    refused("use_pytorch_profiler", _PROFILER),
    refused("pytorch_profiler_collect_shapes", _PROFILER),
    refused("pytorch_profiler_collect_callstack", _PROFILER),
    refused("pytorch_profiler_collect_chakra", _PROFILER),
    refused("record_memory_history", _PROFILER),
    refused("memory_snapshot_path", _PROFILER),
    refused("record_shapes", _PROFILER),
    refused("nvtx_ranges", _PROFILER),
    refused("log_straggler", _SWITCHED, "leave it out: slow workers are found without it"),
    refused("straggler_ctrlr_port", _SWITCHED, "leave it out: slow workers are found without it"),
    refused("straggler_minmax_count", _SWITCHED, "leave it out: slow workers are found without it"),
    refused("disable_straggler_on_startup", _SWITCHED, "leave it out: slow workers are found without it"),
    refused("run_workload_inspector_server", _SWITCHED, "leave it out: `resihp report` tells what workers do"),
)

ROWS: Rows = joined(_LOGGED, _WRITERS, _PROFILES)
