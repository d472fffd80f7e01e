# SPDX-License-Identifier: Apache-2.0
"""Rows: what numbers are made of. Imports `notation` and `row`."""

from megatron_resihp.integration.support.notation import (
    Rows,
    inert,
    joined,
    kernel,
    one_of,
    refused,
    tested,
    without,
)
from megatron_resihp.integration.support.row import Only, Together

_HALF = "integration/test_half_precision.py::test_a_death_beside_a_step_that_is_skipped"
_ENGINE = "integration/test_extra_state.py::test_eight_bits_in_any_order"
_EIGHT_BITS = "GPU: Transformer Engine, on one with 8-bit kernels; only tensorwise has been tried. CPUs take no notice"
_STATELESS = ("tensorwise", "blockwise", "mxfp8")
"""Recipes whose scales are of the tensor at hand. Nothing of a micro-batch then follows from earlier ones."""
_OTHER_RECIPES = "a quantizer of one's own may keep anything; use tensorwise, blockwise or mxfp8"
_PARAMETERS = "parameters then are 8-bit or 4-bit tensors with scales of their own, which no test on CPUs can move"

ROWS: Rows = joined(
    tested("integration/test_plans.py::test_sixteen_bits", "bf16"),
    tested("integration/test_half_precision.py::test_sums_in_half_precision", "fp16"),
    tested(_HALF, "initial_loss_scale loss_scale_window hysteresis accumulate_allreduce_grads_in_fp32"),
    tested(
        "integration/test_half_precision.py::test_a_scale_that_never_moves",
        "loss_scale",
        condition=Together(
            lambda values: values["fp16"] or values["bf16"],
            "in 32 bits only Megatron's distributed optimizer scales losses, and not every plan has it; leave it out",
        ),
    ),
    kernel("core.optimizer:_get_megatron_optimizer_based_on_param_groups", "min_loss_scale"),
    kernel("training.arguments:validate_args", "grad_reduce_in_bf16"),
    tested("integration/test_plans.py::test_kinds_of_model", "fp32_residual_connection"),
    kernel(
        "core.transformer.transformer_config:TransformerConfig.__post_init__",
        "disable_bf16_reduced_precision_matmul",
    ),
    kernel("training.arguments:validate_args", "deterministic_mode", device="GPU: torch's deterministic kernels"),
    inert("core.models.gpt.gpt_model:GPTModel", "fp16_lm_cross_entropy"),
    tested(
        _ENGINE,
        "fp8",
        device=_EIGHT_BITS,
        condition=Together(
            lambda values: values["fp8_recipe"] in _STATELESS,
            "--fp8-recipe delayed takes a tensor's scale from earlier micro-batches, so results would depend on how "
            "micro-batches are distributed after a loss. Replicas also reduce the maxima in each micro-batch, so one "
            "with more micro-batches would wait forever for others; use --fp8-recipe tensorwise, blockwise or mxfp8",
        ),
    ),
    tested(_ENGINE, "fp8_recipe", device=_EIGHT_BITS, condition=one_of("delayed", *_STATELESS, mend=_OTHER_RECIPES)),
    without("fp8_recipe=custom", "core.fp8_utils:get_fp8_recipe", "fp8_quantizer_factory"),
    inert("core.fp8_utils:get_fp8_recipe", "fp8_wgrad"),
    inert(
        "core.extensions.transformer_engine:TEDelayedScaling",
        "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo",
    ),
    kernel(
        "core.fp8_utils:is_first_last_bf16_layer",
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        device=_EIGHT_BITS,
    ),
    refused("fp8_output_proj", "no test covers how a head of Transformer Engine's is cut in slices", "leave it out"),
    refused("fp8_param_gather", _PARAMETERS, "leave it out: parameters are then in 16 bits, and cast in each step"),
    refused("fp4", "Transformer Engine rounds gradients at random, and no recovery repeats what it drew", "use --bf16"),
    without("fp4", "core.fp4_utils:get_fp4_recipe", "fp4_recipe fp4_quantizer_factory"),
    refused("fp4_param_gather", _PARAMETERS, "use --bf16"),
    refused("reuse_grad_buf_for_mxfp8_param_ag", _PARAMETERS, "leave it out, as --fp8-param-gather"),
    refused("te_precision_config_file", "it may choose delayed scaling or four bits for some layers", "leave it out"),
    refused(
        "use_precision_aware_optimizer",
        "masters and moments of other types are in Transformer Engine's optimizer, and no recovery moves them",
        "leave it out: masters and moments are then in fp32",
    ),
    without(
        "use_precision_aware_optimizer",
        "core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        condition=Only(
            lambda given: given in (None, "fp32"),
            "Megatron has other types with --use-precision-aware-optimizer only, which is refused; leave it out",
        ),
    ),
)
