# SPDX-License-Identifier: Apache-2.0
"""The list of everything that --resihp replaces in Megatron's training loop, in one place.

May import megatron and this package.
"""

from functools import partial

from megatron_resihp.integration.loop import course, loop
from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.patches import (
    checkpoints,
    counting,
    data,
    documents,
    padded_buckets,
    parameter_gather,
    parameter_kinds,
    replica_checks,
    result_checks,
    schedule,
    startup,
    stragglers,
)
from megatron_resihp.integration.patches.experts import expert_metrics, router_parts, sharing
from megatron_resihp.integration.releases import Release
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.saves import finishing, handing_over, removing
from megatron_resihp.integration.state import expert_biases, reshardable
from megatron_resihp.integration.step import attention_logits

TRAINING = "megatron.training.training"
BUCKETS = "megatron.core.distributed.param_and_grad_buffer"
FINISHING = "megatron.core.distributed.finalize_model_grads"
ROUTER = "megatron.core.transformer.moe.router"
DDP = "megatron.core.distributed.distributed_data_parallel"


def training_patches(runtime: Runtime, release: Release) -> list[Patch]:
    """All patches of the training loop for one worker. `release`: of the Megatron that is patched."""
    return [
        Patch(
            "megatron.core.parallel_state:initialize_model_parallel",
            partial(startup.wrap_initialize_model_parallel, runtime),
            ("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            "remembers how groups are made",
        ),
        Patch(
            f"{TRAINING}:setup_model_and_optimizer",
            partial(startup.wrap_setup_model_and_optimizer, runtime, release),
            release.set_up,
            "remembers how model and optimizer are made",
        ),
        Patch(
            "megatron.core.optimizer:_get_param_groups",
            partial(parameter_kinds.wrap_get_param_groups, runtime),
            ("model_chunks", "config", "config_overrides"),
            "asks all workers once",
        ),
        *(
            Patch(target, partial(startup.wrap_build_model, runtime), parameters, "builds any plan's chunks")
            for target, parameters in release.builders.items()
        ),
        Patch(
            f"{DDP}:DistributedDataParallel.__init__",
            partial(startup.wrap_ddp, runtime),
            ("self", "config", "ddp_config", "module"),
            "lets new chunks take over the old ones' parameters",
        ),
        Patch(
            f"{TRAINING}:build_pretraining_data_loader",
            lambda original: data.make_loader_builder(runtime),
            ("dataset", "consumed_samples"),
            "gives samplers that can move",
        ),
        Patch(
            "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
            data.build_on_every_worker,
            ("self", "cls", "sizes", "is_built_on_rank", "config"),
            "opens the data sets on every worker",
        ),
        Patch(
            "megatron.training.datasets.fim_dataset:GPTFIMDataset._query_document_sample_shuffle_indices",
            data.wrap_query_sample,
            ("self", "idx"),
            "cuts a sample as its index says",
        ),
        Patch(
            "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
            data.wrap_get_item,
            ("self", "idx"),
            "masks a sample's losses by its own padding",
        ),
        Patch(
            f"{TRAINING}:get_forward_backward_func",
            partial(schedule.wrap_get_forward_backward_func, runtime),
            None,
            "gives each replica its share of the micro-batches",
        ),
        Patch(
            f"{TRAINING}:train",
            partial(loop.wrap_train, runtime),
            (
                "forward_step_func",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "train_data_iterator",
                "valid_data_iterator",
                "process_non_loss_data_func",
                "config",
                "checkpointing_context",
            ),
            "is entered again after a recovery",
        ),
        Patch(
            f"{TRAINING}:train_step",
            partial(loop.wrap_train_step, runtime),
            ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
            "keeps the record of the iteration",
        ),
        Patch(
            "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
            partial(result_checks.wrap_validate_result, runtime),
            ("self", "result", "rejection_func"),
            "does not judge what an aborted collective has left behind",
        ),
        Patch(
            f"{TRAINING}:checkpoint_and_decide_exit",
            partial(loop.wrap_checkpoint_and_decide_exit, runtime),
            (
                "model",
                "optimizer",
                "opt_param_scheduler",
                "iteration",
                "num_floating_point_operations_so_far",
                "checkpointing_context",
                "train_data_iterator",
            ),
            "ends the job in order",
        ),
        Patch(
            f"{TRAINING}:save_checkpoint_and_time",
            lambda original: course.wrap_final(runtime, loop.wrap_save_checkpoint_and_time(runtime, original)),
            ("iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far"),
            "records the true data-parallel size in checkpoints",
        ),
        Patch(
            "megatron.training.initialize:init_persistent_async_worker",
            lambda original: lambda *_: None,
            ("rank", "mp_mode"),
            "the writer of checkpoints is started earlier, before there are connections to other workers",
        ),
        Patch(
            "megatron.training.checkpointing:schedule_async_save",
            handing_over.wrap_schedule_async_save,
            ("async_request",),
            "a writer that is killed leaves no memory of the device behind",
        ),
        Patch(
            "megatron.training.checkpointing:cleanup_old_non_persistent_checkpoint",
            removing.wrap_cleanup,
            ("save_dir", "leave_ckpt_num", "do_async"),
            "keeps the last whole one beside a newer one that is not",
        ),
        Patch(
            f"{TRAINING}:maybe_finalize_async_save",
            partial(finishing.wrap_maybe_finalize_async_save, runtime),
            ("blocking", "terminate"),
            "ends its wait when the epoch breaks, and says which checkpoints are whole",
        ),
        Patch(
            "megatron.training.checkpointing:generate_state_dict",
            partial(checkpoints.wrap_generate_state_dict, runtime),
            (
                "args",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "rng_state",
                "iteration",
                "optim_sd_kwargs",
                "model_sd_kwargs",
                "rerun_state",
            ),
            "writes any plan's state so that any other can load it",
        ),
        Patch(
            "megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            partial(reshardable.wrap_metadata, runtime),
            ("args", "dp_cp_group"),
            "says that the distributed optimizer can load it",
        ),
        Patch(
            f"{TRAINING}:print_datetime",
            partial(course.wrap_final, runtime),
            ("string",),
            "all workers meet in it after the last iteration",
        ),
        Patch(
            f"{TRAINING}:evaluate_and_print_results",
            lambda original: course.wrap_final(runtime, loop.wrap_evaluation(runtime, original)),
            ("prefix", "forward_step_func", "data_iterator", "model", "iteration"),
            "is recovered into after the last iteration",
        ),
        Patch(
            f"{TRAINING}:training_log",
            partial(counting.wrap_training_log, runtime),
            ("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
            "carries loss totals over a recovery",
        ),
        Patch(
            f"{TRAINING}:report_theoretical_memory",
            partial(counting.wrap_theoretical_memory, runtime),
            ("args", "num_microbatches", "verbose"),
            "is of the job's replicas",
        ),
        Patch(
            "megatron.training.wandb_utils:on_save_checkpoint_success",
            lambda original: runtime.log.note_saved,
            ("checkpoint_path", "tracker_filename", "save_dir", "iteration"),
            "node 0 tells W&B",
        ),
        Patch(
            "megatron.training.wandb_utils:on_load_checkpoint_success",
            lambda original: runtime.log.note_loaded,
            ("checkpoint_path", "load_dir"),
            "node 0 tells W&B",
        ),
        Patch(
            f"{TRAINING}:calc_params_l2_norm",
            partial(counting.wrap_params_norm, runtime),
            ("model",),
            "counts each parameter once, under any plan",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
            expert_metrics.do_not_reduce,
            ("self", "metric_names", "pg_collection"),
            "leaves the sums to the step's agreement",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
            partial(sharing.wrap_moe_layer, runtime),
            ("self", "config", "submodules"),
            "keeps experts apart, under any plan of a job whose replicas share them",
        ),
        Patch(
            f"{ROUTER}:sinkhorn",
            partial(router_parts.wrap_sinkhorn, runtime),
            ("cost", "tol"),
            "weighs the same tokens against each other, under any plan",
        ),
        Patch(
            f"{ROUTER}:apply_router_token_dropping",
            partial(router_parts.wrap_dropping, runtime),
            ("routing_probs", "routing_map", "router_topk", "capacity_factor", "drop_policy", "pad_to_capacity"),
            "drops the same tokens, under any plan",
        ),
        Patch(
            f"{FINISHING}:_update_router_expert_bias",
            expert_biases.sum_only,
            ("model", "config", "tp_dp_cp_group"),
            "leaves the change of biases to the agreed step",
        ),
        *(
            Patch(target, expert_biases.sum_quantiles, parameters, "leaves the change of biases to the agreed step")
            for target, parameters in release.quantile_balancing.items()
        ),
        Patch(
            f"{FINISHING}:reset_model_temporary_tensors",
            expert_biases.keep_counts,
            ("config", "model"),
            "keeps the counts of tokens until the step",
        ),
        Patch(
            f"{TRAINING}:clip_qk",
            partial(attention_logits.tell_maximum, runtime),
            ("model", "log_max_only"),
            "leaves maxima, and the change of weights, to the agreed step",
        ),
        Patch(
            "megatron.core.utils:StragglerDetector.report",
            partial(stragglers.wrap_report, runtime),
            ("self", "total_flops", "log_interval"),
            "logs what was measured in this epoch",
        ),
        Patch(
            f"{TRAINING}:num_floating_point_operations",
            partial(counting.wrap_flops, runtime),
            ("args", "batch_size"),
            "follows the count of operations",
        ),
        Patch(
            f"{TRAINING}:consume_seqlen_stats_in_iteration",
            partial(documents.wrap_consume, runtime),
            (),
            "leaves the count of documents to the step's agreement",
        ),
        Patch(
            f"{BUCKETS}:_ParamAndGradBucketGroup.finish_param_sync",
            partial(parameter_gather.wrap_finish_param_sync, runtime),
            ("self", "skip_next_bucket_dispatch"),
            "times the wait for parameters",
        ),
        Patch(
            f"{DDP}:DistributedDataParallel.enable_forward_pre_hook",
            parameter_gather.wrap_enable_forward_pre_hook,
            ("self",),
            "may be called again",
        ),
        Patch(
            f"{DDP}:DistributedDataParallel.disable_forward_pre_hook",
            parameter_gather.wrap_disable_forward_pre_hook,
            ("self", "param_sync"),
            "may be called again",
        ),
        Patch(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            padded_buckets.wrap_fully_reshardable,
            ("self", "model_sharded_state_dict", "is_loading", "metadata"),
            "saves each parameter's own state where buckets are padded",
        ),
        Patch(
            f"{TRAINING}:check_param_hashes_across_dp_replicas",
            partial(replica_checks.wrap_check_param_hashes, runtime),
            ("model", "cross_check"),
            "compares the replicas of any plan",
        ),
        Patch(
            "megatron.core.transformer.attention:SelfAttention.run_realtime_tests",
            partial(replica_checks.wrap_run_realtime_tests, runtime),
            ("self",),
            "asks only replicas that ask as often",
        ),
    ]
