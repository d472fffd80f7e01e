# SPDX-License-Identifier: Apache-2.0
"""Rows: batches, iterations, optimizer, learning rate, random streams. Imports `batches`, `notation`, `row`."""

from collections.abc import Mapping
from typing import Any

from megatron_resihp.integration.support.batches import is_followed
from megatron_resihp.integration.support.notation import (
    Rows,
    at_start,
    inert,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    unread,
    without,
)
from megatron_resihp.integration.support.row import Together

_SCHEDULE = "training.training:get_optimizer_param_scheduler"
_OFFLOADED = "Megatron has it with --use-precision-aware-optimizer only, which is refused"
_GONE = "Megatron no longer takes it"

_BATCHES: Rows = joined(
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "micro_batch_size global_batch_size train_iters",
    ),
    tested("integration/test_batches.py::test_a_schedule_of_one_size_trains_as_that_size_does", "train_samples"),
    unread("training.config.training_config:TrainingConfig", "rampup_batch_size"),
    tested(
        "integration/test_batches.py::test_batches_that_grow",
        "step_batch_size_schedule",
        condition=Together(
            is_followed,
            "use --train-samples, and sizes that begin at 0 and grow: with --train-iters Megatron sizes data sets "
            "and rates for another batch than the schedule's",
        ),
    ),
    refused("batch_size", _GONE, "use --micro-batch-size"),
    refused(
        "iterations_to_skip",
        "a skipped iteration takes data without a step, which the record of iterations doesn't know",
    ),
    refused(
        "phase_transition_iterations",
        "the data set changes in the middle of a job, and each worker opens its data once",
    ),
    refused("skip_train", "there is no training to keep alive", "leave --resihp out"),
    tested(
        "integration/test_recovery_points.py::test_a_death_while_evaluating",
        "eval_iters",
    ),
    tested(
        "integration/test_recovery_points.py::test_a_death_while_evaluating",
        "eval_interval",
        needed="Megatron itself divides the job's iterations by it, also where it never evaluates",
    ),
    tested(
        "integration/test_plan_failures.py::test_evaluation_of_other_micro_batches_and_with_helpers",
        "eval_micro_batch_size",
    ),
    tested("integration/test_nodes.py::test_a_node_that_died_comes_back", "eval_global_batch_size"),
    inert("training.training:train", "start_eval_at_iter"),
    refused(
        "full_validation multiple_validation_sets validation_set_names",
        "how long an evaluation lasts follows from the data then, and survivors meet again by its length",
    ),
    tested("integration/test_overlap.py::test_a_death_among_gathered_and_stale_parameters", "test_mode"),
)

_LOOP: Rows = joined(
    inert("training.training:train", "empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval"),
    inert("training.training:post_training_step_callbacks", "train_sync_interval"),
    tested(
        "integration/test_half_precision.py::test_a_scale_that_never_moves",
        "check_for_nan_in_loss_and_grad",
    ),
    tested("integration/test_real_script.py::test_from_plan_to_plan_and_back", "check_for_spiky_loss"),
    refused(
        "check_for_large_grads",
        "it remembers the largest gradient of each worker's own buckets, which plans change",
        "leave it out, or use --check-for-spiky-loss",
    ),
    refused(
        "result_rejected_tracker_filename",
        "iterations that its file names are skipped, which the record of iterations doesn't know",
    ),
    tested(
        "integration/test_flags.py::test_a_death_and_other_degrees",
        "rerun_mode",
        condition=one_of("disabled", "validate_results", mend="use disabled or validate_results"),
    ),
    tested(
        "integration/test_reruns.py::test_an_injected_error_ends_the_job_as_megatron_does",
        "error_injection_rate error_injection_type",
    ),
    tested(
        "integration/test_overlap.py::test_a_death_among_gathered_and_stale_parameters",
        "check_weight_hash_across_dp_replicas_interval",
    ),
    refused(
        "gpu_sniff_test_interval",
        "it measures devices in groups and at moments that no recovery knows",
        "leave it out: slow workers are found without it",
    ),
)


def _can_go_on(values: Mapping[str, Any]) -> bool:
    """Loading asks Megatron's optimizer for a function that makes its first state; for sgd it has none. Muon gathers
    matrices while it steps, unless it is to take each as it is cut, and gradients of scaled losses are not divided."""
    if values["optimizer"] == "sgd":
        return not (values.get("save") or values.get("load"))
    if values["optimizer"] in ("muon", "dist_muon"):
        alone = values["muon_tp_mode"] == "blockwise" and not values["loss_scale"]
        shared = values["optimizer"] == "dist_muon" or values["use_distributed_optimizer"]
        return alone and values["muon_scalar_optimizer"] == "adam" and (not shared or _can_be_shared_out(values))
    return bool(values["optimizer"] == "adam")


def _can_be_shared_out(values: Mapping[str, Any]) -> bool:
    """Megatron can't step what is shared out in 32 bits. In its older format each replica has a file of what it owns,
    and in the next forward pass parameters may be gathered into memory of gradients, which a recovery frees."""
    saves = values["ckpt_format"] != "torch_dist" and (values.get("save") or values.get("load"))
    return bool(values["bf16"] and not saves and not values["overlap_param_gather"])


_MUON = "integration/test_muon.py::test_a_death_and_other_stages"
_DISTRIBUTED_MUON = "integration/test_distributed_muon.py::test_a_death_of_one_of_four_replicas"


_OPTIMIZER: Rows = joined(
    tested(
        "integration/test_plans.py::test_from_plan_to_plan_and_back",
        "optimizer",
        condition=Together(
            _can_go_on,
            "use adam; or sgd without --save and --load, since Megatron can't load what it saves of it; or muon with "
            "--muon-tp-mode blockwise and --muon-scalar-optimizer adam, without --loss-scale: in other modes it "
            "communicates during the step; with --use-distributed-optimizer it needs --bf16 and --ckpt-format "
            "torch_dist, without --overlap-param-gather",
        ),
    ),
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "sgd_momentum"),
    kernel("core.optimizer:get_megatron_optimizer", "weight_decay adam_beta1 adam_beta2 adam_eps"),
    kernel("core.optimizer.clip_grads:clip_grad_by_total_norm_fp32", "clip_grad"),
    tested(
        "integration/test_flags.py::test_a_death_and_other_degrees",
        "apply_wd_to_qk_layernorm no_weight_decay_cond_type",
    ),
    without("optimizer=lion", "core.optimizer.optimizer_config:OptimizerConfig", "lion_beta1 lion_beta2"),
    tested(
        _MUON,
        """muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer""",
    ),
    tested(_DISTRIBUTED_MUON, "use_layer_wise_param_layout"),
    refused("optimizer_cpu_offload", _OFFLOADED, "use --use-distributed-optimizer"),
    without(
        "optimizer_cpu_offload",
        "core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer",
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    ),
    without(
        "optimizer_cpu_offload",
        "core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "optimizer_offload_fraction use_torch_optimizer_for_cpu_offload",
    ),
    refused("optimizer_cuda_graph", "the plugin takes the step itself, in two parts with an agreement between"),
    refused(
        "dump_param_to_param_group_map",
        "the file is written by all workers together, and again in each epoch",
    ),
)

_RATE: Rows = joined(
    tested("integration/test_plans.py::test_from_plan_to_plan_and_back", "lr min_lr lr_decay_style lr_warmup_iters"),
    kernel(
        _SCHEDULE,
        """lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
        lr_warmup_fraction lr_warmup_samples lr_warmup_init start_weight_decay end_weight_decay
        weight_decay_incr_style""",
    ),
    at_start("core.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set", "override_opt_param_scheduler"),
    tested(
        "integration/test_rejoin.py::test_in_a_resumed_job_it_needs_no_checkpoint",
        "use_checkpoint_opt_param_scheduler",
    ),
    tested(
        "integration/test_overlap.py::test_a_death_among_gathered_and_stale_parameters",
        "decoupled_lr decoupled_min_lr",
    ),
    refused("warmup", _GONE, "use --lr-warmup-fraction"),
    refused("freeze_all_layers", "without gradients there is no step to agree on"),
)

_RANDOM: Rows = joined(
    tested("integration/test_flags.py::test_a_death_and_other_degrees", "seed"),
    tested(
        "unit/integration/streams/test_generators.py::test_a_layer_draws_the_same_whatever_came_before",
        "te_rng_tracker",
        device="GPU: Transformer Engine's generator; with dropout not if parts of layers are recomputed",
    ),
    refused("inference_rng_tracker", "it keeps no random streams, which training with dropout needs"),
    refused("data_parallel_random_init", "replicas begin with different random streams, which no plan keeps apart"),
)

ROWS: Rows = joined(_BATCHES, _LOOP, _OPTIMIZER, _RATE, _RANDOM)
