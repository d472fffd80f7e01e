# SPDX-License-Identifier: Apache-2.0
"""The factors of the covering array: flags that few or no recipes have, and what goes together with what.

A value is the flags that it adds to `BASE`. Some are refused by the plugin as yet; `benchmarks/covering.py` leaves
those out and names them. Imports `pairs` only.
"""

from collections.abc import Mapping
from typing import Final

from recipe_runs.covering.pairs import Forbidden

BASE: Final = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 12 --lr 1e-3 --min-lr 1e-4 "
    "--mock-data --log-interval 1 --log-num-zeros-in-grad --transformer-impl local"
)
"""The sizes are those that `shrinking` leaves as they are."""

_LATENT: Final = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
)
_EXPERTS: Final = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2"

FACTORS: Final[Mapping[str, Mapping[str, str]]] = {
    "grid": {
        "replicas": "",
        "tensor": "--tensor-model-parallel-size 2",
        "sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
        "both": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--use-tp-pp-dp-mapping",
        "interleaved": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication",
        "layout": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL",
    },
    "replicas": {
        "plain": "--log-params-norm",
        "overlapped": "--log-params-norm --overlap-grad-reduce --ddp-num-buckets 3",
        "distributed": "--log-params-norm --use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw",
        # Megatron tells the norm of parameters of which some have not been gathered yet.
        "gathered": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
    },
    "precision": {
        "fp32": "",
        "bf16": "--bf16",
        "bf16 sums": "--bf16 --grad-reduce-in-bf16",
        "fp16": "--fp16 --initial-loss-scale 4096 --loss-scale-window 4 --hysteresis 1 --min-loss-scale 2",
        "fp16 fixed": "--fp16 --loss-scale 128 --accumulate-allreduce-grads-in-fp32 "
        "--no-check-for-nan-in-loss-and-grad",
    },
    "optimizer": {
        "adam": "",
        "decays": "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style cosine",
        "decays all": "--weight-decay 0.5 --no-weight-decay-cond-type apply_wd_to_qk_layernorm",
        "sgd": "--optimizer sgd --sgd-momentum 0.9",
        "muon": "--optimizer muon --muon-momentum 0.9 --muon-fp32-matmul-prec high",
    },
    "attention": {
        "many heads": "",
        "few groups": "--group-query-attention --num-query-groups 2 --add-qkv-bias",
        "output gate": "--attention-output-gate --group-query-attention --num-query-groups 4",
        "latent": _LATENT,
    },
    "window": {"all": "", "window": "--window-size 7,0 --window-attn-skip-freq 2"},
    "softmax": {"vanilla": "", "off by one": "--softmax-type off-by-one"},
    "norm of heads": {"none": "", "learnt": "--qk-layernorm --apply-wd-to-qk-layernorm", "l2": "--qk-l2-norm"},
    "positions": {
        "learnt": "",
        "none": "--position-embedding-type none",
        "rope": "--position-embedding-type rope --rotary-seq-len-interpolation-factor 2",
        "scaled": "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4 --no-rope-freq 2",
        "yarn": "--position-embedding-type yarn --rotary-scaling-factor 4 --mscale 0.9 --mscale-all-dim 0.9",
    },
    "norm": {
        "layer": "",
        "zero-centred": "--apply-layernorm-1p --norm-epsilon 1e-6",
        "RMS": "--normalization RMSNorm",
    },
    "unit": {
        "gelu": "",
        "squared": "--squared-relu --no-bias-gelu-fusion --disable-bias-linear",
        "swiglu": "--swiglu --disable-bias-linear",
        "quick gated": "--quick-geglu --disable-bias-linear --glu-linear-offset 1 --activation-func-clamp-value 0.5",
    },
    "experts": {
        "none": "",
        "grouped": f"{_EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
        "alternating": f"{_EXPERTS} --moe-layer-freq ([0]*1+[1]*3) --moe-z-loss-coeff 1e-3 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall --moe-router-pre-softmax",
        "in groups": f"{_EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2 --moe-router-dtype fp32",
        "biased": f"{_EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "with capacity": f"{_EXPERTS} --moe-expert-capacity-factor 0.75 --moe-token-drop-policy position "
        "--moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall",
        "evened out": "--num-experts 8 --moe-router-topk 1 --moe-ffn-hidden-size 64 "
        "--moe-router-load-balancing-type sinkhorn",
    },
    # Only a head with weights of its own predicts further tokens, so that flag is a part of the value.
    "predictions": {"one": "", "two": "--mtp-num-layers 1 --untie-embeddings-and-output-weights"},
    "embeddings": {"tied": "", "untied": "--untie-embeddings-and-output-weights"},
    "transfer": {
        "none": "",
        "muP": "--use-mup --mup-base-hidden-size 32 --mup-embedding-mult 2 --mup-output-mult 0.5 --mup-base-head-dim 4 "
        "--mup-attn-scale-power 0.9",
    },
    "initial": {
        "normal": "",
        "wide": "--init-method-std 0.05 --embedding-init-method-std 0.1",
    },
    "recomputed": {
        "nothing": "",
        "attention": "--recompute-activations",
        # Without biases: the recomputed function returns the last one, and then Megatron's backward pass calls itself
        # without end.
        "parts": "--recompute-granularity selective --recompute-modules core_attn mlp --disable-bias-linear "
        "--no-bias-gelu-fusion",
        "all": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    },
    "residual": {"as parameters": "", "fp32": "--fp32-residual-connection"},
    "schedule": {
        "linear": "--lr-warmup-iters 2",
        "stable": "--lr-decay-style WSD --lr-wsd-decay-style cosine --lr-wsd-decay-iters 6 --lr-decay-iters 24 "
        "--lr-warmup-init 1e-4 --lr-warmup-iters 2",
        "decoupled": "--decoupled-lr 2e-3 --decoupled-min-lr 2e-4",
    },
    "loss": {"of micro-batches": "", "of tokens": "--calculate-per-token-loss --check-for-spiky-loss"},
    "evaluation": {
        "none": "--eval-iters 0 --eval-interval 6",
        "others": "--eval-iters 1 --eval-interval 6 --eval-micro-batch-size 1 --eval-global-batch-size 8 "
        "--start-eval-at-iter 6",
    },
    "data": {"whole": "", "documents": "--reset-position-ids --eod-mask-loss"},
    "saves": {
        "none": "",
        "kept": "--save d --save-interval 6 --save-retain-interval 12 --dist-ckpt-workers 1 --no-save-rng",
        # In its other format, Megatron can't save a padded bucket of which a replica has no parameter.
        "beside training": "--save d --save-interval 6 --async-save --use-persistent-ckpt-worker "
        "--async-ckpt-cpu-priority 5 --dist-ckpt-optim-fully-reshardable",
        "non-persistent": "--save d --save-interval 6 --non-persistent-save-interval 4 "
        "--non-persistent-ckpt-type global",
    },
}
"""The flags of each value of each factor."""

_MIXTURES: Final = tuple(value for value in FACTORS["experts"] if value != "none")

FORBIDDEN: Final = (
    Forbidden({"unit": ["gelu"], "experts": _MIXTURES}, "experts have no fused gelu"),
    Forbidden({"grid": ["tensor"], "experts": _MIXTURES}, "tensor parallelism cuts experts beside sequences only"),
    Forbidden({"attention": ["latent"], "norm of heads": ["l2"]}, "latent attention has no such norm"),
    Forbidden({"attention": ["latent"], "positions": ["yarn"]}, "latent attention has yarn of its own"),
    Forbidden({"predictions": ["two"], "positions": ["learnt", "yarn"]}, "further predictions need rope or nothing"),
    Forbidden({"predictions": ["two"], "grid": ["layout"]}, "this layout has no place for further predictions"),
    Forbidden({"predictions": ["two"], "embeddings": ["tied"]}, "further predictions need a head with its own weights"),
    Forbidden({"optimizer": ["sgd"], "saves": ["kept", "beside training", "non-persistent"]}, "it can't be loaded"),
    Forbidden({"optimizer": ["sgd"], "replicas": ["distributed", "gathered"]}, "Megatron distributes other optimizers"),
    Forbidden({"optimizer": ["muon"], "replicas": ["distributed"], "precision": ["fp32"]}, "Megatron can't step it"),
    Forbidden({"optimizer": ["muon"], "replicas": ["gathered"]}, "the plugin has matrices gathered at once"),
    Forbidden({"optimizer": ["muon"], "precision": ["fp16", "fp16 fixed"]}, "Megatron has no Muon in half precision"),
    Forbidden({"optimizer": ["muon"], "grid": ["tensor", "sequence"]}, "survivors make one stage of its degree only"),
    Forbidden({"residual": ["fp32"], "precision": ["fp32"]}, "it is for 16 bits"),
)
