# SPDX-License-Identifier: Apache-2.0
"""Rows: how work is cut and overlapped, and what the groups are made of. Imports `notation` and others."""

from megatron_resihp.integration.support.notation import (
    Rows,
    given_up,
    inert,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import NotWith
from megatron_resihp.integration.support.rows import context, sharing_experts

_FSDP = "shards of parameters that exist once are lost with their worker: there are no copies of them"
_WITHOUT = "integration/test_flags.py::test_overlaps_that_a_job_does_without"
_USER_BUFFERS = (
    "Transformer Engine's kernels wait in each other's memory: nothing aborts one that waits for a dead worker, and "
    "after a time-out it computes on with what is there"
)

_DEGREES: Rows = joined(
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "tensor_model_parallel_size pipeline_model_parallel_size",
    ),
    tested("integration/test_recovery_movers.py::test_sequence_parallelism", "sequence_parallel"),
    tested(
        "integration/test_own_layouts.py::test_a_middle_stage_loses_a_worker_and_another_one_gets_other_layers",
        """pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split""",
    ),
    context.ROWS,
    sharing_experts.ROWS,
    refused(
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "slices of state don't follow a cut of weights beyond the tensor-parallel degree",
        "leave it out, or raise --tensor-model-parallel-size",
    ),
    refused("encoder_num_layers", "the layers of an encoder have no place in a plan", "use --num-layers"),
    refused("decoder_num_layers", "the layers of a decoder have no place in a plan", "use --num-layers"),
)

_PIPELINE: Rows = joined(
    tested(
        "integration/test_interleaved.py::test_a_worker_dies_and_another_plan_comes_and_goes",
        "num_layers_per_virtual_pipeline_stage",
    ),
    tested(
        "integration/test_interleaved.py::test_a_death_in_other_layouts",
        """num_virtual_stages_per_pipeline_rank microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush
        overlap_p2p_comm""",
    ),
    refused(
        "pipeline_model_parallel_comm_backend",
        "groups of another library can't be aborted when an epoch breaks",
        "leave it out for NCCL",
    ),
    refused("use_ring_exchange_p2p", "it needs a torch that is not public, and its waits have no bound"),
    tested(
        "integration/test_flags.py::test_weight_gradients_of_the_head_after_the_pipeline",
        "defer_embedding_wgrad_compute",
        condition=NotWith(
            "overlap_grad_reduce",
            "Megatron sums the head's gradient over the replicas before it has computed what it has left for later",
        ),
        device="GPU: Transformer Engine's layers and Apex's kernel; CPUs have stand-ins for them",
    ),
    tested("integration/test_flags.py::test_weight_gradients_of_the_head_after_the_pipeline", "wgrad_deferral_limit"),
    given_up(
        _WITHOUT,
        "delay_wgrad_compute",
        "only Transformer Engine's layers leave weight gradients for later, and no test on GPUs covers that a broken "
        "epoch forgets them",
    ),
    refused("mtp_standalone", "a stage of its own for multi-token prediction has no place in a plan"),
)

_TENSOR: Rows = joined(
    given_up(_WITHOUT, "tp_comm_overlap", _USER_BUFFERS),
    without(
        "tp_comm_overlap",
        "core.extensions.transformer_engine:TELayerNormColumnParallelLinear",
        """tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_split_rs""",
    ),
    without(
        "tp_comm_overlap",
        "training.initialize:_initialize_tp_communicators",
        "tp_comm_bootstrap_backend tp_comm_overlap_cfg",
    ),
    refused(
        "symmetric_ar_type",
        "symmetric memory of a dead peer stays mapped, and no recovery registers it again",
    ),
)

_EXPERT_OVERLAP: Rows = joined(
    tested(
        "integration/test_expert_overlap.py::test_a_death_and_the_return_of_the_worker",
        "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release",
    ),
    kernel(
        "core.pipeline_parallel.combined_1f1b:combined_1f1b_schedule_for_no_pipelining",
        "high_priority_a2a_comm_stream",
    ),
    given_up(
        _WITHOUT,
        "overlap_dispatch_backward_with_experts_wgrad",
        "it leaves the experts' weight gradients for a hook, which plans do by ops of their own",
    ),
)

_REPLICAS: Rows = joined(
    tested("integration/test_early_sums.py::test_the_same_bits_as_after_the_pass", "overlap_grad_reduce"),
    tested(
        "integration/test_distributed_optimizer.py::test_deaths_in_other_layouts",
        "ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw",
    ),
    tested(
        "integration/test_distributed_optimizer.py::test_a_copy_becomes_the_last_replica",
        "use_distributed_optimizer",
    ),
    kernel("training.training:train", "align_grad_reduce"),
    tested(
        "integration/test_overlap.py::test_a_death_among_gathered_and_stale_parameters",
        "overlap_param_gather ddp_average_in_collective",
    ),
    tested(
        "integration/test_interleaved.py::test_deaths_while_the_first_chunk_is_gathered",
        "overlap_param_gather_with_optimizer_step",
    ),
    tested("integration/test_interleaved.py::test_a_death_in_other_layouts", "align_param_gather"),
    tested(
        "integration/test_overlap.py::test_several_instances_of_the_optimizer",
        "num_distributed_optimizer_instances",
    ),
    refused(
        "ddp_reduce_scatter_with_fp32_accumulation ddp_param_name_patterns_for_fp32_local_accumulation",
        "it sums gradients by another collective, in buffers that a broken epoch may leave half filled",
    ),
    # A batch that the job's own replicas don't divide is refused, and others share it out unevenly.
    inert("core.num_microbatches_calculator:ConstantNumMicroBatchesCalculator", "decrease_batch_size_if_needed"),
    refused(
        "nccl_ub", "buffers are registered with communicators, and no recovery registers them anew", "leave it out"
    ),
    without(
        "nccl_ub",
        "core.distributed.param_and_grad_buffer:_ParamAndGradBuffer",
        "disable_symmetric_registration",
    ),
    refused("create_all_gather_group", "it makes groups beside those that a recovery knows"),
)

_SHARDED: Rows = joined(
    refused("use_megatron_fsdp use_torch_fsdp2", _FSDP, "use --use-distributed-optimizer"),
    refused(
        "init_model_with_meta_device",
        "parameters that are made without memory are filled by FSDP, which is refused",
        "leave it out",
    ),
    without(
        "use_megatron_fsdp",
        "core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
        """data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather""",
    ),
    without(
        "use_megatron_fsdp",
        "core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:ParamAndGradBuffer",
        """fsdp_manual_registration gradient_reduce_div_fusion keep_fp8_transpose_cache
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail""",
    ),
    without(
        "use_megatron_fsdp",
        "core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp:MegatronFSDP",
        "suggested_communication_unit_size",
    ),
    unread("training.arguments:_add_distributed_args", "enable_full_sharding_in_hsdp"),
    without(
        "use_torch_fsdp2",
        "training.training:get_megatron_ddp_config",
        "torch_fsdp2_reshard_after_forward",
    ),
)

_GROUPS: Rows = joined(
    tested(
        "integration/test_plans.py::test_groups_for_host_tensors_beside_those_of_devices",
        "distributed_backend",
        condition=one_of("nccl", "gloo", mend="use nccl or gloo"),
    ),
    tested("integration/test_nodes.py::test_a_whole_node_dies", "use_tp_pp_dp_mapping"),
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "use_gloo_process_groups"),
    inert("training.initialize:_initialize_distributed", "distributed_timeout_minutes local_rank"),
    inert("core.parallel_state:get_nccl_options", "nccl_communicator_config_path", device="GPU: NCCL reads it"),
    kernel("core.jit:disable_jit_fuser", "disable_jit_fuser"),
    refused("model_parallel_size", "Megatron no longer takes it", "use --tensor-model-parallel-size"),
    refused("lazy_mpu_init", "groups are made at the start, from the plan's own roles"),
    refused("use_sharp sharp_enabled_group", "a switch's memory is given to one communicator for the job's life"),
    refused("high_priority_stream_groups", "no test covers aborting and making again groups with such streams"),
    refused(
        "distributed_timeout_seconds_after_init",
        "it changes the time-outs of groups that the next epoch no longer has",
        "use --distributed-timeout-minutes",
    ),
    refused(
        "flight_recorder_dump_path",
        "torch writes it when its watchdog ends a process, which the plugin keeps it from doing",
        "leave it out: events.jsonl tells what happened, and each worker's log where it waited",
    ),
    without(
        "flight_recorder_dump_path",
        "training.initialize:_initialize_distributed",
        """flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec""",
    ),
    refused("fake_process_group", "a single process has no peers"),
)

ROWS: Rows = joined(_DEGREES, _PIPELINE, _TENSOR, _EXPERT_OVERLAP, _REPLICAS, _SHARDED, _GROUPS)
