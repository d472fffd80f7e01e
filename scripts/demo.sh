#!/usr/bin/env bash
# Shows what this project is for, in two minutes and without a GPU: 8 workers (TP 2 x PP 2 x DP 2) train a GPT twice, once
# undisturbed and once with two of them killed. The second kill takes the only complete replica apart, so that the job goes
# on with one that is put together from what is left of both. Exits non-zero unless all 40 iterations were reached, no
# sample was lost or repeated, and each iteration's loss agrees with the undisturbed run's.
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
    --micro-batch-size 1 --global-batch-size 8 --train-iters 40
    # model
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    # optimizer
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 4
    # data: a token is a byte, a sample is packed with whole documents and parts of long ones
    --data-path "$corpus" --split 98,1,1 --tokenizer-type NullTokenizer --vocab-size 257
    --dataloader-inter-document-masking --eval-iters 0 --eval-interval 40 --log-interval 1
    # Megatron without the kernels that only GPUs have
    --distributed-backend gloo --transformer-impl local --attention-backend unfused
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --resihp --resihp-record-samples
)

train() { # NAME [FLAG...]
    "$resihp" launch --stand-in --nproc-per-node 8 --run-dir "$out/$1" scripts/pretrain_gpt.py "${training[@]}" "${@:2}"
}

echo "== the run to compare with: nobody dies"
train reference

echo "== the run with two kills: worker 5 at iteration 10, worker 2 at iteration 20"
ended=0
train run --resihp-drill kill:5@10 kill:2@20 || ended=$?

compared=("$out/run" --reference "$out/reference")
"$resihp" report "${compared[@]}" --json --plot "$out/run.png" >"$out/summary.json"
echo "== $out/summary.json and $out/run.png:"
"$resihp" report "${compared[@]}" --check || ended=$?
exit "$ended"
