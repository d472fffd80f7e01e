# SPDX-License-Identifier: Apache-2.0
"""Flags that change the model or how it is trained, some of them together in each job: a replica dies, stages of other
degrees go on, and the job's own layout again; losses are those of the undisturbed job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import EXPERTS, LINEAR, Jobs, ask_at, ask_for, check_training, tiny
from stock_runs import check_like_stock, stock_steps
from test_interleaved import UNLIKE, own_plan
from test_plan_failures import are_heterogeneous
from test_plans import PREDICTIONS, stages
from test_query_groups import plan

from megatron_resihp.report.run.summary import compare

NIGHTLY = pytest.mark.nightly
TWO: dict[str, Any] = {"tensor_model_parallel_size": 2, "global_batch_size": 2, "train_iters": 11}
"""Two members in each of two replicas, and two layers."""
GATED: dict[str, Any] = {
    "swiglu": None, "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5,
    "ffn_hidden_size": 64, "disable_bias_linear": True, "softmax_type": "learnable", "clip_grad": 0.1,
    "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"],
    "padded_vocab_size": 96, "seed": 4321,
}  # fmt: skip
NORMS: dict[str, Any] = {
    "qk_layernorm": True, "apply_wd_to_qk_layernorm": True, "weight_decay": 0.5, "attention_output_gate": True,
    "group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True, "disable_bias_linear": True,
    "disable_gloo_process_groups": True, "kv_channels": 16,
}  # fmt: skip
POSITIONS: dict[str, Any] = {
    "use_rope_scaling": True, "rope_scaling_factor": 4.0, "no_rope_freq": 2, "window_size": "7,0",
    "window_attn_skip_freq": 2, "softmax_type": "off-by-one", "qk_l2_norm": True,
}  # fmt: skip
TRANSFER: dict[str, Any] = {
    "use_mup": True, "mup_base_hidden_size": 16, "mup_embedding_mult": 2.0, "mup_output_mult": 0.5,
    "mup_base_head_dim": 4, "mup_attn_scale_power": 0.9, "no_weight_decay_cond_type": "apply_wd_to_qk_layernorm",
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
DESCENT: dict[str, Any] = {
    "optimizer": "sgd", "sgd_momentum": 0.8, "weight_decay": 0.1, "lr": "0.1", "min_lr": "0.05",
}  # fmt: skip
YARN: dict[str, Any] = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "rerun_mode": "disabled"}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4, "qk_layernorm": True, "rotary_scaling_factor": 4.0, "normalization": "RMSNorm",
    "disable_bias_linear": True, "sequence_parallel": True, "recompute_granularity": "selective",
    "recompute_modules": ["layernorm", "mla_up_proj"],
}  # fmt: skip
CHUNKED: dict[str, Any] = {"mlp_chunks_for_training": 3, "sequence_parallel": True}
DISTRIBUTED: dict[str, Any] = {
    "distribute_saved_activations": True, "recompute_granularity": "full", "recompute_method": "uniform",
    "recompute_num_layers": 1,
}  # fmt: skip
"""Members keep a part of each layer's input, which they gather to compute it again."""
GROUPED: dict[str, Any] = EXPERTS | {
    "moe_grouped_gemm": True, "swiglu": True, "sequence_parallel": True, "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True, "recompute_granularity": "selective",
    "recompute_modules": ["moe", "shared_experts"],
}  # fmt: skip
DEFERRED: dict[str, Any] = {
    "num_layers": 4, "pipeline_model_parallel_size": 2, "global_batch_size": 8, "train_iters": 11,
    "no_gradient_accumulation_fusion": None, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2,
}  # fmt: skip
"""Each replica leaves the head's weight gradients of two of its micro-batches for later."""
AT_ONCE: dict[str, Any] = {"defer_embedding_wgrad_compute": None, "wgrad_deferral_limit": None}
OTHERWISE: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": 1, "untie_embeddings_and_output_weights": True, "wgrad_deferral_limit": 0,
}  # fmt: skip
"""Those of all micro-batches, in an interleaved pipeline."""
SHARED_OUT: dict[str, Any] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
}  # fmt: skip
"""What the head was given has to be gathered first."""


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=NIGHTLY, id=name)
        for name, model in {
            "gates, recomputed": GATED,
            "norms, output gate": NORMS,
            "positions, windows": POSITIONS,
            "muP": TRANSFER,
            "yarn": YARN,
            "gradient descent": DESCENT,
            "grouped experts": GROUPED,
            "latent attention": LATENT,
            "linear attention": LINEAR,
            "MLPs in chunks": CHUNKED,
            "distributed inputs": DISTRIBUTED,
            "further predictions": PREDICTIONS | EXPERTS | {"sequence_parallel": True},
        }.items()
    ],
)
def test_a_death_and_other_degrees(jobs: Jobs, tmp_path: Path, model: dict[str, Any]) -> None:
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    model = TWO | model
    job = jobs.run(tiny(**model, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, False, True, False]
    # The control: a job that learns nothing has other losses.
    still = jobs.run(tiny(**model | {"lr": 0, "min_lr": 0}), workers=4)
    assert (compare(job.summary.loss, still.summary.loss) or 0) > 1e-3


@NIGHTLY
@pytest.mark.parametrize(
    ("model", "workers"),
    [({}, 4), (OTHERWISE, 4), (SHARED_OUT, 8)],
    ids=["some", "all, interleaved", "gathered"],
)
def test_weight_gradients_of_the_head_after_the_pipeline(
    jobs: Jobs, tmp_path: Path, model: dict[str, Any], workers: int
) -> None:
    """A job that leaves them for later trains what stock Megatron trains that doesn't, also in a plan whose second
    replica has one stage."""
    model, words = DEFERRED | model, ask_at(tmp_path, (UNLIKE, 5), (own_plan((0, 3)), 8))
    plans = words if workers == 4 else None
    job = jobs.run(tiny(**model, resihp_inject="kill:2@3:backward", resihp_plan=plans), workers=workers)
    check_training(job, jobs.reference(tiny(**model), workers=workers))
    assert are_heterogeneous(job) == ([False, False, True, False] if plans else [False, False])
    check_like_stock(job, stock_steps(jobs, workers, **model | AT_ONCE))


@NIGHTLY
def test_overlaps_that_a_job_does_without(jobs: Jobs, tmp_path: Path) -> None:
    """Nothing else changes, in plans with stages of one member too, where Megatron refuses one of them."""
    model = TWO | {"sequence_parallel": True}
    asked = {"tp_comm_overlap": True, "delay_wgrad_compute": True, "overlap_dispatch_backward_with_experts_wgrad": True}
    words = ask_for(tmp_path, plan(stages([2], [1, 0])), plan(stages([0, 1])))
    job = jobs.run(tiny(**model | asked, resihp_plan=words, resihp_inject="kill:3@1:backward"), workers=4)
    check_training(job, jobs.reference(tiny(**model), workers=4))
    assert are_heterogeneous(job) == [False, False, True, False]
    lines = [job.log(worker).count("resihp: without overlap: --") for worker in range(4)]
    assert lines == [3, 0, 0, 0]
