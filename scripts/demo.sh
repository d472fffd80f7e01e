#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows what this project is for, in minutes and without a GPU: 8 workers (TP 2 x PP 2 x DP 2) train a GPT
# twice, once undisturbed and once with all that can befall them. Worker 6 becomes slow, and is well again; then workers 5 and 2
# are killed, one in each replica, and come back. Each time the job takes another plan in place: layers and micro-batches go
# where there is time for them, the peers of the dead go on working, and in the end all is as it was at first. Exits non-zero
# unless all iterations were reached, no sample was lost or repeated, and each loss agrees with the undisturbed run's.
#
#   scripts/demo.sh [OUT]     leaves OUT/summary.json, OUT/run.png and the logs of both runs (OUT is ./out by default)
set -euo pipefail
out=$(realpath -m "${1:-out}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
export CUDA_VISIBLE_DEVICES= # the same everywhere: the stand-in steps back where it finds GPUs
resihp=.venv/bin/resihp
corpus=$out/data/python
mkdir -p "$out"
rm -f "$out/summary.json" "$out/run.png"

# The standard library's sources: real documents, from a few bytes to more than 100,000.
if [[ ! -f $corpus.idx ]]; then
    .venv/bin/python scripts/make_dataset.py "$corpus" --python-source
fi

training=(
    # job
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 8 --train-iters 70
    # model
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    # optimizer
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 4
    # data: a token is a byte, a sample is packed with whole documents and parts of long ones
    --data-path "$corpus" --split 98,1,1 --tokenizer-type NullTokenizer --vocab-size 257
    --dataloader-inter-document-masking --num-workers 0 --eval-iters 0 --eval-interval 70 --log-interval 1
    # Megatron without the kernels that only GPUs have
    --distributed-backend gloo --transformer-impl local --attention-backend unfused
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    # Processes that share two cores show nothing of a slow device: each op is made to last as long as one would take.
    --resihp --resihp-record-samples --resihp-emulate scripts/demo_device.json --resihp-strategy resihp-paper
    --resihp-plan-wait 30 # nor shall it be a race whose plan is run after a death
)

train() { # NAME [FLAG...]
    "$resihp" launch --stand-in --nproc-per-node 8 --max-restarts 1 --run-dir "$out/$1" \
        scripts/pretrain_gpt.py "${training[@]}" "${@:2}"
}

echo "== the run to compare with, which also tells what is normal: nothing happens"
train reference

echo "== the run: worker 6 at half its speed from iteration 12 to 25, worker 5 killed at 40, worker 2 at 44"
ended=0
train run --resihp-cost-model "$out/reference/cost_model.json" --resihp-act act --resihp-seconds-between-changes 2 \
    --resihp-inject slow:6:0.54@12 clear@26 kill:5@40 kill:2@44 || ended=$?

compared=("$out/run" --reference "$out/reference")
"$resihp" report "${compared[@]}" --json --plot "$out/run.png" >"$out/summary.json"
echo "== $out/summary.json and $out/run.png:"
"$resihp" report "${compared[@]}" --check || ended=$?
exit "$ended"
