# SPDX-License-Identifier: Apache-2.0
"""Rows: checkpoints, and when a job ends. Imports `notation` and `row`."""

from megatron_resihp.integration.support.notation import (
    Rows,
    at_start,
    inert,
    joined,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import Only

_LAYOUT = "integration/test_checkpoints.py::test_a_job_goes_on_in_its_own_layout"
_LOAD = "training.checkpointing:load_checkpoint"
_SAVE = "training.checkpointing:save_checkpoint"
_LOCAL = "each rank's part is on its node's disk, under one layout, and ranks and layouts change with the epoch"
_GLOBAL = "use --non-persistent-ckpt-type global"
_DUMPED = "each rank of Megatron's first layout writes a file, and ranks change with the epoch"

_SAVED: Rows = joined(
    tested(_LAYOUT, "save save_interval load"),
    tested(
        _LAYOUT,
        "ckpt_format",
        condition=one_of("torch", "torch_dist", mend="use torch or torch_dist; Megatron has the others for FSDP only"),
    ),
    tested(
        "integration/test_checkpoints.py::test_masters_and_moments_are_those_that_megatron_s_distributed_optimizer_saves",
        "dist_ckpt_optim_fully_reshardable",
    ),
    tested("integration/test_ends.py::test_a_saved_state_can_be_gone_on_from", "no_load_rng"),
    at_start(
        _LOAD,
        "finetune pretrained_checkpoint ckpt_step exit_on_missing_checkpoint auto_detect_ckpt_format no_load_optim",
    ),
    inert(_SAVE, "no_save_optim no_save_rng ckpt_fully_parallel_save"),
    at_start(
        "training.checkpointing:_load_global_dist_base_checkpoint",
        "ckpt_fully_parallel_load dist_ckpt_strictness",
    ),
    inert(
        "training.arguments:validate_args",
        "use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated",
    ),
    unread("training.config.training_config:CheckpointConfig", "dist_ckpt_save_pre_mcore_014"),
)

_ASYNCHRONOUS: Rows = joined(
    tested(
        "integration/test_async_saves.py::test_a_save_under_way_when_a_worker_dies_is_dropped_whole_and_made_up_for",
        "async_save async_strategy use_persistent_ckpt_worker",
    ),
    inert(
        "training.async_utils:init_persistent_async_worker",
        "async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm",
    ),
    tested(
        "integration/test_async_saves.py::test_stock_megatron_goes_on_from_the_save_that_follows",
        "ckpt_assume_constant_structure save_retain_interval verify_integrity dist_ckpt_workers",
    ),
    tested(
        "integration/test_async_saves.py::test_a_save_under_way_when_a_worker_dies_is_dropped_whole_and_made_up_for",
        "ckpt_fully_parallel_load_process_group ckpt_load_validate_sharding_integrity",
    ),
    at_start(
        "training.checkpointing:_load_global_dist_base_checkpoint",
        "ckpt_fully_parallel_load_exchange_algo",
    ),
    inert(_SAVE, "ckpt_fully_parallel_save_process_group"),
    refused(
        "distrib_optim_fully_reshardable_mem_efficient", "it gathers over groups that heterogeneous plans don't have"
    ),
)

_TEMPORARY: Rows = joined(
    tested(
        "integration/test_async_saves.py::test_non_persistent_saves_are_dropped_and_kept_like_others",
        "non_persistent_ckpt_type",
        condition=one_of(None, "global", mend=f"{_LOCAL}; {_GLOBAL}"),
    ),
    tested(
        "integration/test_async_saves.py::test_non_persistent_saves_are_dropped_and_kept_like_others",
        "non_persistent_save_interval",
    ),
    inert("training.checkpointing:save_checkpoint", "non_persistent_global_ckpt_dir"),
    refused(
        """non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication replication_jump
        replication_factor""",
        _LOCAL,
        _GLOBAL,
    ),
)

_OTHERS: Rows = joined(
    tested(
        "integration/test_async_saves.py::test_a_save_under_way_when_a_worker_dies_is_dropped_whole_and_made_up_for",
        "use_checkpoint_args",
    ),
    at_start(
        "training.checkpointing:load_args_from_checkpoint",
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args",
    ),
    at_start(_LOAD, "load_main_params_from_ckpt"),
    tested(
        "integration/test_async_saves.py::test_an_iteration_that_is_given_in_the_checkpoint_s_place",
        "override_ckpt_iteration",
    ),
    refused(
        "ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format",
        "a conversion trains nothing",
        "leave --resihp out",
    ),
    without(
        "ckpt_format=fsdp_dtensor",
        "training.checkpointing:_load_base_checkpoint",
        "strict_fsdp_dtensor_load",
    ),
    without("fp8_param_gather", "core.dist_checkpointing.strategies.torch:MCoreLoadPlanner", "stream_ckpt_dequant"),
    refused("save_params_interval", _DUMPED, "leave it out"),
    refused("save_activations_interval", _DUMPED, "leave it out"),
    refused("save_tokens_per_expert_interval", _DUMPED, "leave it out"),
    refused("save_wgrads_interval", _DUMPED, "leave it out"),
    refused("save_dgrads_interval", _DUMPED, "leave it out"),
    refused(
        "enable_msc",
        "no test covers that checkpoints and data on object storage outlive a broken epoch",
        "save to a file system",
    ),
    inert("training.arguments:parse_args", "disable_msc_deprecated"),
)

_ENDS: Rows = joined(
    tested("integration/test_rejoin.py::test_in_a_resumed_job_it_needs_no_checkpoint", "exit_interval"),
    tested(
        "integration/test_async_saves.py::test_a_job_whose_time_is_up_ends_after_the_same_step_on_all_workers",
        "exit_duration_in_mins",
    ),
    inert("training.global_vars:set_global_variables", "exit_signal_handler"),
    inert(
        "training.global_vars:set_global_variables",
        "exit_signal",
        condition=Only(
            lambda value: value.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"),
            "use SIGTERM, SIGINT, SIGHUP or SIGUSR1, at which resihp launch saves and ends the job",
        ),
    ),
    refused("exit_signal_handler_for_dataloader", "the launcher has the signals, and loaders end with their worker"),
    refused("exit_signal_handler_for_training", "the launcher has the signals, and workers would answer by themselves"),
    refused(
        "adlr_autoresume",
        "it needs a scheduler's library that is not public, and ends the job by its own collectives",
        "send SIGTERM to the launcher",
    ),
    without("adlr_autoresume", "training.training:post_training_step_callbacks", "adlr_autoresume_interval"),
)

ROWS: Rows = joined(_SAVED, _ASYNCHRONOUS, _TEMPORARY, _OTHERS, _ENDS)
