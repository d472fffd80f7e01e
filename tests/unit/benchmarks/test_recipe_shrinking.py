# SPDX-License-Identifier: Apache-2.0
"""Recipes for GPUs become command lines for a few CPU workers, by the rules of `benchmarks/recipe_runs/shrinking`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs.shrinking.draft import Draft, read_options
from recipe_runs.shrinking.grid import expand
from recipe_runs.shrinking.schedule import batch_in
from recipe_runs.shrinking.shrink import Shrunk, shrink

NAMES = {"--norm-epsilon": "--layernorm-epsilon"}
DENSE = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 4096 "
    "--micro-batch-size 4 --global-batch-size 1536 --train-iters 500000 --lr 6e-5 --min-lr 6e-6 --bf16 --save $DIR "
    "--load $DIR --save-interval 1000 --norm-epsilon 1e-6 --transformer-impl transformer_engine --split 949,50,1 "
    "--clip-grad 1.0 --data-path $DATA --vocab-file $VOCAB"
)


def small(text: str, *more: str) -> tuple[Shrunk, dict[str, str]]:
    words = [*text.split(), *more]
    known = dict.fromkeys(NAMES.values()) | {word: None for word in words if word.startswith("--")}
    names = {name: name for name in known if name not in NAMES} | NAMES
    shrunk = shrink(words, names)
    return shrunk, {flag: " ".join(values) for flag, values in read_options(shrunk.words, {}).items()}


@pytest.mark.parametrize(
    ("degrees", "expected", "workers"),
    [((1, 1, 1), (1, 1, 1), 4), ((8, 1, 1), (4, 1, 1), 8), ((8, 8, 1), (2, 2, 1), 8), ((2, 4, 1), (2, 2, 1), 8),
     ((1, 2, 1), (1, 2, 1), 4), ((4, 4, 2), (2, 1, 2), 8), ((1, 16, 1), (1, 4, 1), 8)],
)  # fmt: skip
def test_at_most_8_workers_of_at_least_2_replicas(
    degrees: tuple[int, ...], expected: tuple[int, ...], workers: int
) -> None:
    flags = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    asked = [word for flag, degree in zip(flags, degrees, strict=True) for word in (flag, str(degree))]
    shrunk, options = small(DENSE, *asked)
    assert tuple(int(options[flag]) for flag in flags) == expected
    assert shrunk.workers == workers


def test_batches_grow_before_the_survivors_change_their_plan() -> None:
    schedule = ("--step-batch-size-schedule", "0:384 1M:768 2M:1152")
    words = DENSE.replace("--global-batch-size 1536 --train-iters 500000", "--train-samples 2000").split()
    known = dict.fromkeys(word for word in [*words, *schedule] if word.startswith("--")) | {"--layernorm-epsilon": None}
    shrunk = shrink([*words, *schedule], {name: name for name in known if name not in NAMES} | NAMES)
    sizes = [batch_in(Draft(read_options(shrunk.words, {})), iteration) for iteration in range(1, 13)]
    first = sizes[0]
    assert sizes == [first] * 2 + [2 * first] * 2 + [3 * first] * 8


def test_sizes_keep_their_ratios_and_other_flags_stay() -> None:
    shrunk, options = small(DENSE, "--ffn-hidden-size", "24576", "--group-query-attention", "--num-query-groups", "24")
    assert (options["--hidden-size"], options["--ffn-hidden-size"]) == ("64", "128")
    assert (options["--num-attention-heads"], options["--num-query-groups"]) == ("8", "2")
    assert (options["--seq-length"], options["--max-position-embeddings"]) == ("32", "64")
    assert (options["--lr"], options["--min-lr"]) == ("0.001", "0.0001")
    assert options["--layernorm-epsilon"] == "1e-6" and options["--clip-grad"] == "1.0" and "--bf16" in options
    assert "--group-query-attention" in options
    assert shrunk.kernels == ("--transformer-impl transformer_engine -> local",)
    assert shrunk.replaced[:2] == ("data -> --mock-data", "tokenizer -> NullTokenizer")
    assert "--data-path" not in options and "--vocab-file" not in options
    assert options["--save"] == options["--load"] == "{run}/checkpoints"
    assert shrunk.in_directory("/x")[shrunk.words.index("--save") + 1] == "/x/checkpoints"


def test_the_schedule_fits_its_iterations() -> None:
    by_samples = DENSE.replace("--train-iters 500000", "--train-samples 19531250 --lr-warmup-samples 3906252")
    _, options = small(by_samples, "--lr-decay-samples", "1949218748", "--fp16", "--decoupled-lr", "6e-4")
    batch = int(options["--global-batch-size"])
    assert batch == 8 * int(options["--micro-batch-size"]) == 16
    assert int(options["--train-samples"]) == 12 * batch
    assert int(options["--lr-warmup-samples"]) == 2 * batch
    assert int(options["--lr-decay-samples"]) == 24 * batch
    assert options["--decoupled-lr"] == "0.01" and options["--initial-loss-scale"] == "4096"


def test_experts_keep_groups_that_can_be_chosen_from() -> None:
    experts = "--num-experts 256 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 8".split()
    _, options = small(DENSE, *experts, "--moe-layer-freq", "([0]*3+[1]*93)", "--expert-model-parallel-size", "16")
    count, groups = int(options["--num-experts"]), int(options["--moe-router-num-groups"])
    assert (count, groups, options["--moe-router-group-topk"], options["--moe-router-topk"]) == (16, 4, "2", "2")
    assert options["--moe-layer-freq"] == "([0]*1+[1]*3)"


@pytest.mark.parametrize(
    ("tensor", "experts", "expert_tensor", "expected"),
    [(1, 16, None, (1, 2, None)), (2, 4, 1, (2, 4, "1")), (4, 2, 2, (4, 2, "2")), (2, 2, 2, (2, 2, "2"))],
)
def test_whole_stages_share_experts_as_in_the_recipe(
    tensor: int, experts: int, expert_tensor: int | None, expected: tuple[int, int, str | None]
) -> None:
    degrees = {"tensor": tensor, "expert-model": experts, "expert-tensor": expert_tensor}
    flags = [word for name, degree in degrees.items() if degree
             for word in (f"--{name}{'-model' * (name == 'tensor')}-parallel-size", str(degree))]  # fmt: skip
    shrunk, options = small(DENSE, "--num-experts", "64", "--pipeline-model-parallel-size", "1", *flags)
    found = (int(options.get("--tensor-model-parallel-size", 1)), int(options["--expert-model-parallel-size"]))
    assert (*found, options.get("--expert-tensor-parallel-size")) == expected
    assert shrunk.workers % (found[0] * 2) == 0, "each expert is in two replicas"


def test_groups_of_experts_without_experts_are_of_whole_stages() -> None:
    flags = "--tensor-model-parallel-size 2 --context-parallel-size 2 --expert-tensor-parallel-size 4".split()
    _, options = small(DENSE, *flags, "--pipeline-model-parallel-size", "2")
    members = int(options["--tensor-model-parallel-size"]) * int(options["--context-parallel-size"])
    assert int(options["--expert-tensor-parallel-size"]) == members


@pytest.mark.parametrize(
    ("flags", "layers", "expected"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", "24", {"--num-layers-per-virtual-pipeline-stage": "1"}),
        ("--num-virtual-stages-per-pipeline-rank 4", "32", {"--num-virtual-stages-per-pipeline-rank": "2"}),
        (
            "--pipeline-model-parallel-layout Et*2|(tt|)*6tmL",
            "15",
            {"--pipeline-model-parallel-layout": "Et|t|t|t|t|t|t|tmL"},
        ),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "6", {}),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", "12", {}),
    ],
)
def test_layers_fit_the_pipeline(flags: str, layers: str, expected: dict[str, str]) -> None:
    _, options = small(DENSE, "--pipeline-model-parallel-size", "4", *flags.split(), "--num-layers", layers)
    assert expected.items() <= options.items()
    stages = int(options["--pipeline-model-parallel-size"])
    ends = sum(flag in options for flag in flags.split() if flag.startswith("--account"))
    assert (int(options["--num-layers"]) + ends) % stages == 0


def test_a_layout_of_which_one_stage_is_left_keeps_both_ends() -> None:
    shared = "--num-experts 64 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1".split()
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*7|t*7mL --num-layers 14".split()
    _, options = small(DENSE, "--tensor-model-parallel-size", "2", *shared, *pipeline)
    assert options["--pipeline-model-parallel-layout"] == "EttttmL" and options["--num-layers"] == "4"


def test_layouts_are_read_as_megatron_writes_them() -> None:
    assert expand("Et*2|(tt|)*2t|mL") == ["Ett", "tt", "tt", "t", "mL"]


def test_flags_that_mean_nothing_on_cpus_are_lost_with_a_reason() -> None:
    shrunk, options = small(DENSE, "--fp8-format", "hybrid", "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor")
    assert shrunk.lost == ("fp8's numbers: --fp8-format", "the three kinds of FSDP: --use-megatron-fsdp")
    assert options["--ckpt-format"] == "torch_dist"


def test_nothing_is_drawn_that_stock_megatron_would_draw_otherwise() -> None:
    shrunk, options = small(DENSE, "--hidden-dropout", "0.1", "--moe-input-jitter-eps", "0.01")
    assert options["--hidden-dropout"] == options["--attention-dropout"] == "0.0"
    assert "--moe-input-jitter-eps" not in options
    assert {"dropout -> 0", "--moe-input-jitter-eps -> none"} <= set(shrunk.replaced)


OFFICIAL = Path(os.environ.get("RESIHP_RECIPES") or "no-such-file")


def test_megatron_accepts_what_recipes_shrink_to(repository: Path, tmp_path: Path) -> None:
    """In a process of its own, as the stand-in for GPUs has to be in place. RESIHP_RECIPES names a file of more."""
    grids = ["", "--tensor-model-parallel-size 8 --sequence-parallel", "--pipeline-model-parallel-size 16"]
    recipes = [{"name": grid, "args": f"{DENSE} {grid}".split()} for grid in grids]
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps(recipes))
    for each in filter(Path.exists, (file, OFFICIAL)):
        command = [sys.executable, repository / "benchmarks" / "recipe_runs" / "validate.py", each]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert finished.returncode == 0, finished.stderr
        answer = json.loads(finished.stdout.splitlines()[-1])
        assert answer["refused"] == {} and answer["recipes"] >= len(recipes)


def test_saves_beside_training_need_no_further_package() -> None:
    shrunk, options = small(DENSE, "--async-save", "--use-persistent-ckpt-worker", "--async-ckpt-use-cpu-shm")
    assert options["--async-strategy"] == "mcore" and "--async-ckpt-use-cpu-shm" not in options
    assert "--async-strategy nvrx -> mcore" in shrunk.replaced
    assert "--async-strategy" not in small(DENSE)[1]


def test_grouped_experts_stay_and_are_named_as_computed_otherwise() -> None:
    shrunk, options = small(DENSE, "--num-experts", "64", "--moe-grouped-gemm")
    assert "--moe-grouped-gemm" in options
    assert "--moe-grouped-gemm -> experts one after another" in shrunk.kernels


def test_each_kind_of_save_happens() -> None:
    """A persistent one takes the place of another that is due in the same iteration."""
    _, options = small(DENSE, "--non-persistent-save-interval", "100", "--non-persistent-ckpt-type", "global")
    persistent, other = int(options["--save-interval"]), int(options["--non-persistent-save-interval"])
    assert {step for step in range(1, 13) if step % other == 0} - {
        step for step in range(1, 13) if step % persistent == 0
    }


def test_a_schedule_of_batches_has_as_many_steps_as_the_recipe_reaches() -> None:
    """The others begin where it ends."""
    schedule = "--step-batch-size-schedule 0:384 200B:768 400B:1152"
    by_samples = DENSE.replace("--global-batch-size 1536 --train-iters 500000", "--train-samples 19531250")
    _, first = small(f"{by_samples} {schedule}")
    assert first["--step-batch-size-schedule"] == f"0:16 {12 * 16 * 32}:32 {(12 * 16 + 1) * 32}:48"
    assert int(first["--train-samples"]) == 12 * 16 and "--global-batch-size" not in first
    _, two = small(f"{by_samples.replace('19531250', '100000000')} {schedule}")
    samples = 4 * 16 + 8 * 32
    assert two["--step-batch-size-schedule"] == f"0:16 {4 * 16 * 32}:32 {samples * 32}:48"
    assert int(two["--train-samples"]) == samples


def test_errors_that_end_a_job_are_not_injected() -> None:
    shrunk, options = small(DENSE, "--error-injection-rate", "100", "--error-injection-type", "transient_error")
    assert int(options["--error-injection-rate"]) > 10**6 and options["--error-injection-type"] == "transient_error"
    assert any("--error-injection-rate" in what for what in shrunk.replaced)


def test_samples_to_fill_in_are_of_documents() -> None:
    """Megatron cuts no mock data."""
    shrunk, options = small(DENSE, "--fim-data", "--fim-rate", "0.5")
    assert options["--data-path"] == "{run}/../documents" and "--mock-data" not in options
    assert options["--fim-rate"] == "0.5" and not shrunk.lost
