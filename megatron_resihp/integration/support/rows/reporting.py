# SPDX-License-Identifier: Apache-2.0
"""Rows: what a job tells, to whom, and profiling. Imports `notation`."""

from megatron_resihp.integration.support.notation import Rows, inert, joined, refused, tested

_LOG = "training.training:training_log"
_LOGS = "integration/test_logs.py::test_logs_of_a_job_with_two_deaths"
_PROFILE = "integration/test_logs.py::test_a_profile_is_of_the_first_epoch"
_SUMMED = "it is summed in groups that heterogeneous plans don't have"
_SWITCHED = "it starts a server or a measurement once, for ranks that change with the epoch"

_LOGGED: Rows = joined(
    tested("integration/test_log_lines.py::test_losses_of_an_interval", "log_interval"),
    tested("integration/test_plan_failures.py::test_a_worker_without_work_sees_no_documents", "log_progress"),
    inert(_LOG, "log_throughput log_timers_to_tensorboard log_loss_scale_to_tensorboard"),
    inert(_LOG, "log_memory_to_tensorboard log_world_size_to_tensorboard"),
    inert("training.training:evaluate_and_print_results", "log_validation_ppl_to_tensorboard"),
    inert("training.global_vars:_set_timers", "timing_log_option"),
    inert("training.training:train_step", "barrier_with_L1_time"),
    inert("training.initialize:setup_logging", "logging_level"),
    tested(_LOGS, "timing_log_level log_params_norm log_num_zeros_in_grad log_energy"),
    inert(_LOG, "log_memory_interval"),
    inert("training.utils.common_utils:report_memory", "log_device_memory_used"),
    tested(
        "integration/test_attention_logits.py::test_what_is_logged",
        "log_max_attention_logit",
        device="GPU: Transformer Engine tells of logits",
    ),
    tested("integration/test_logs.py::test_logs_of_any_plan", "moe_per_layer_logging"),
)

_WRITERS: Rows = joined(
    tested(_LOGS, "tensorboard_dir wandb_project wandb_exp_name wandb_save_dir"),
    inert("training.training:training_log", "tensorboard_log_interval"),
    inert("training.global_vars:_set_tensorboard_writer", "tensorboard_queue_size"),
    inert("training.global_vars:_set_wandb_writer", "wandb_entity"),
    inert(
        "training.global_vars:_set_one_logger",
        "enable_one_logger one_logger_project one_logger_run_name one_logger_async",
    ),
    inert("training.one_logger_utils:get_timestamp_in_ms", "app_tag_run_name app_tag_run_version"),
    refused("config_logger_dir", "each epoch rebuilds the objects, and would write a file for each again"),
)

_PROFILES: Rows = joined(
    tested(_PROFILE, "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler"),
    inert(
        "training.training:train",
        """pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
        record_shapes nvtx_ranges""",
    ),
    inert(_LOG, "record_memory_history memory_snapshot_path"),
    tested(
        "integration/test_stragglers.py::test_a_death_and_other_degrees",
        "log_straggler straggler_ctrlr_port disable_straggler_on_startup straggler_minmax_count",
    ),
    refused("run_workload_inspector_server", _SWITCHED, "leave it out: `resihp report` tells what workers do"),
)

ROWS: Rows = joined(_LOGGED, _WRITERS, _PROFILES)
