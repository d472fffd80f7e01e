#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Example of a job: trains a Llama of 8B parameters on nodes of eight GPUs. Run it from the root of the checkout:
#   scripts/slurm/example_8b.sh PREFIX --nodes=4
# PREFIX.bin and PREFIX.idx are the data set (scripts/make_dataset.py). What follows PREFIX goes to sbatch. CHECKPOINTS is where
# checkpoints go (default: checkpoints/resihp), RESIHP_BIN the folder of the `resihp` command (default: .venv/bin). docs/operations.md, "GPUs and NCCL", says what to install.
set -euo pipefail

if (($# < 1)); then
    echo "usage: scripts/slurm/example_8b.sh PREFIX [SBATCH OPTIONS]" >&2
    exit 2
fi
prefix=$1

training=(
    --resihp
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 2
    # Each node is a complete replica. In Megatron's default order, each stage's replicas would be next to each other: with two
    # nodes, each node would hold a stage that is nowhere else.
    --use-tp-pp-dp-mapping
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0
    --hidden-dropout 0
    --seq-length 4096
    --max-position-embeddings 4096
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 10000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 100
    --bf16
    --data-path "$prefix"
    --tokenizer-type NullTokenizer
    --vocab-size 257
    --dataloader-inter-document-masking
    --log-interval 1
    --eval-iters 0
    --eval-interval 10000
    --save "${CHECKPOINTS:-$PWD/checkpoints/resihp}"
    --save-interval 1000
)

export RESIHP_BIN=${RESIHP_BIN:-$PWD/.venv/bin}
exec sbatch --nodes=2 --gpus-per-node=8 "${@:2}" scripts/slurm/job.sbatch scripts/pretrain_gpt.py "${training[@]}"
