# SPDX-License-Identifier: Apache-2.0
"""Files of TensorBoard and W&B, read back by their own libraries: a job with deaths writes what one without does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import BF16, EXPERTS, FP32, PRETRAIN, Job, Jobs, Tolerance, ask_at, ask_for, check_training, tiny
from stock_runs import stock_losses, torchrun_losses
from test_distributed_optimizer import FOUR as REPLICAS
from test_distributed_optimizer import UNLIKE
from test_plans import FOUR, MODEL, UNIFORM_LAYOUT, own_plan
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from megatron_resihp.plan import ParallelPlan

Curves = dict[str, list[tuple[int, float]]]
"""Points by tag: steps and values."""

NIGHTLY = pytest.mark.nightly
LOGGED: dict[str, Any] = {
    "log_params_norm": True, "log_num_zeros_in_grad": True, "log_timers_to_tensorboard": True, "timing_log_level": 2,
    "log_memory_to_tensorboard": True, "log_validation_ppl_to_tensorboard": True, "log_throughput": True,
    "log_energy": True, "eval_interval": 2, "eval_iters": 1, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
"""Embeddings of words that an iteration has not seen have gradients of zero."""
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
"""Two replicas of two stages; worker 3 is the last rank."""
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARED: dict[str, Any] = {"use_distributed_optimizer": True}
EACH_LAYER: dict[str, Any] = {"moe_per_layer_logging": True}
SOME_LAYERS: dict[str, Any] = {"moe_layer_freq": "[0,1,1,1]", "sequence_parallel": True}
SAID = {"lm loss", "grad-norm", "num-zeros", "params-norm", "learning-rate", "batch-size", "lm loss validation"}
VALIDATED = "lm loss validation"


def tensorboard_curves(directory: Path) -> Curves:
    """All points of all curves."""
    found = events_in(directory)
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def events_in(directory: Path) -> Any:
    # It takes a while, and not all processes that collect these tests need it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def wandb_curves(directory: Path) -> Curves:
    """All points of all curves of the one run that W&B keeps here, in a directory of each coordinator."""
    files, found = sorted(directory.glob("wandb/offline-run-*/run-*.wandb")), Curves()
    assert len({file.name for file in files}) == 1
    for record in (record for file in files for record in wandb_records(file)):
        for item in record.history.item:
            tag = item.key or ".".join(item.nested_key)
            if not tag.startswith("_"):
                found.setdefault(tag, []).append((record.history.step.num, json.loads(item.value_json)))
    return found


def wandb_records(file: Path) -> Iterator[Record]:
    """What a file has, the end of which W&B had in memory if it was killed."""
    store = DataStore()
    try:
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            yield Record.FromString(data)
    except AssertionError:
        return


def of_megatron(curves: Curves) -> Curves:
    return {tag: points for tag, points in curves.items() if not tag.startswith("resihp/")}


def varies(tag: str) -> bool:
    """Times and memory differ from run to run, and timers begin anew in each epoch."""
    return tag.endswith(("-time", "throughput")) or tag.startswith("mem-")


def check_curves(
    found: Curves, expected: Curves, steps: int, tolerance: Tolerance = FP32, zeros: float | None = 0.0
) -> None:
    """Each step once, and the same values.

    Args:
        zeros: by what share the counts of zeros may differ; None: by any.
    """
    found, expected = of_megatron(found), of_megatron(expected)
    tags = {tag for tag in found.keys() | expected.keys() if not varies(tag)}
    assert tags >= SAID
    assert tags <= found.keys() and tags <= expected.keys(), found.keys() ^ expected.keys()
    for tag in sorted(tags):
        assert [step for step, _ in found[tag]] == [step for step, _ in expected[tag]], tag
        values, known = ([value for _, value in curves[tag]] for curves in (found, expected))
        if tag.startswith("num-zeros"):
            # The head leaves no zeros in a matrix that it shares, but by chance.
            assert zeros is None or (min(values) > 0 and values == pytest.approx(known, rel=zeros, abs=0)), tag
        else:
            relative = tolerance.norm if "norm" in tag else tolerance.loss
            assert values == pytest.approx(known, rel=relative), tag
    for curves in (found, expected):
        assert [step for step, _ in curves["lm loss"]] == list(range(1, steps + 1))


def logged(directory: Path, **changes: Any) -> dict[str, Any]:
    wandb = {"wandb_project": "tests", "wandb_exp_name": directory.name, "wandb_save_dir": directory}
    return LOGGED | wandb | {"tensorboard_dir": directory} | changes


def run(jobs: Jobs, directory: Path, workers: int = 4, **changes: Any) -> Job:
    return jobs.run(tiny(**logged(directory, **changes)), workers=workers)


def check_files(mended: Path, whole: Path, steps: int, tolerance: Tolerance = FP32, zeros: float | None = 0.0) -> None:
    check_curves(tensorboard_curves(mended), tensorboard_curves(whole), steps, tolerance, zeros)
    check_curves(wandb_curves(mended), wandb_curves(whole), steps, tolerance, zeros)


def test_logs_of_a_job_with_two_deaths(jobs: Jobs, tmp_path: Path) -> None:
    """The last rank dies when all have finished iteration 3 and only it has noted what is logged of that. The second
    victim is a first stage, whose place a standby takes."""
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    reference = run(jobs, whole, **PIPELINE)
    job = run(jobs, mended, **PIPELINE, resihp_inject=["kill:3@3:between", "kill:0@5:backward"])
    check_training(job, reference)
    assert len(job.summary.deaths) == 2 and not job.events("log_failed"), job.tails()
    check_files(mended, whole, 6)
    # Megatron writes its arguments as it enters its loop, which a job with deaths does more than once.
    texts = [{tag: [point.step for point in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
             for found in map(events_in, (mended, whole))]  # fmt: skip
    assert texts[0] == texts[1] and texts[0]["seq_length/text_summary"] == [0]
    own = tensorboard_curves(mended)
    assert [value for _, value in own["resihp/workers_alive"]] == [4, 4, 4, 3, 2, 2]
    assert [step for step, _ in own["resihp/pause_s"]] == [4, 5]
    assert [step for step, _ in wandb_curves(mended)["resihp/slow_workers"]] == [1, 2, 3, 4, 5, 6]


@NIGHTLY
@pytest.mark.parametrize(
    ("layout", "deaths", "tolerance", "zeros"),
    [
        ({}, ["kill:3@2:between", "kill:2@4:evaluate"], FP32, 0.0),
        ({}, ["kill:3@4:step", "kill:2@4:recovery-ready"], FP32, 0.0),
        ({}, ["kill:3@6:between"], FP32, 0.0),
        (TENSOR, ["kill:3@3:backward", "kill:0@4:norm"], FP32, 0.0),
        (TENSOR | SHARED, ["kill:3@2:gather", "kill:0@4:norm"], FP32, 0.0),
        (PIPELINE | SHARED, ["kill:3@3:between", "kill:0@4:step"], FP32, 0.0),
        (PIPELINE | SHARED | {"bf16": True}, ["kill:3@3:between", "kill:0@4:step"], BF16, 0.01),
        (PIPELINE | {"bf16": True}, ["kill:3@3:between", "kill:0@4:step"], BF16, 0.01),
        (TENSOR | EXPERTS | EACH_LAYER, ["kill:3@3:between", "kill:0@4:step"], FP32, 0.0),
        (PIPELINE | {"eval_interval": 4}, ["kill:3@6:between", "kill:0@6:between"], FP32, 0.0),
    ],
    ids=[
        "last rank twice", "in a recovery", "after the last iteration", "tensor", "tensor, distributed optimizer",
        "pipeline, distributed optimizer", "pipeline, distributed optimizer, bf16", "bf16", "experts",
        "two after the last iteration",
    ],
)  # fmt: skip
def test_logs_of_other_layouts(
    jobs: Jobs, tmp_path: Path, layout: dict[str, Any], deaths: list[str], tolerance: Tolerance, zeros: float
) -> None:
    """Of bf16, some gradients are zero or not by the order of sums."""
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    reference = run(jobs, whole, **layout)
    job = run(jobs, mended, **layout, resihp_inject=deaths)
    check_training(job, reference, tolerance)
    assert len(job.summary.deaths) == len(deaths)
    check_files(mended, whole, 6, tolerance, zeros)


@NIGHTLY
@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("TP 2 and 1", "V shape", "unlike replicas"), {}),
        (("TP 4", "a standby keeps its shard", "TP 2 and 1 help each other"), SHARED),
        (("TP 1", "unlike replicas", "interleaved"), {"untie_embeddings_and_output_weights": False}),
        (("TP 2 and 1", "V shape, W apart", "unlike replicas"), EXPERTS | EACH_LAYER | SOME_LAYERS),
    ],
    ids=["chunks", "distributed optimizer", "one matrix for word embeddings and head", "experts"],
)
def test_logs_of_any_plan(jobs: Jobs, tmp_path: Path, names: Sequence[str], model: dict[str, Any]) -> None:
    whole, mended = tmp_path / "whole", tmp_path / "mended"
    plans: list[ParallelPlan] = [*(FOUR[name] for name in names), own_plan(4)]
    model = MODEL | UNIFORM_LAYOUT | {"train_iters": 15} | model
    reference = run(jobs, whole, **model)
    job = run(jobs, mended, **model, resihp_plan=ask_for(tmp_path, *plans, every=3))
    check_training(job, reference)
    assert len(job.events("epoch_started")) == 1 + len(plans)
    zeros = 0.0 if "untie_embeddings_and_output_weights" not in model else None
    check_files(mended, whole, 15, zeros=zeros)


def norms_of_parameters(directory: Path) -> list[float]:
    return [value for _, value in tensorboard_curves(directory)["params-norm"]]


@NIGHTLY
def test_norms_of_parameters_are_those_of_the_job_s_own_layout(jobs: Jobs, tmp_path: Path) -> None:
    """Megatron counts parameters once for each instance of the optimizer. The plans have one, or no such optimizer."""
    pytest.importorskip("einops", reason="einops is not installed: Megatron makes the groups of instances with it")
    model = {"use_distributed_optimizer": True, "bf16": True, "train_iters": 12}
    instances = {"num_distributed_optimizer_instances": 2}
    once, stock, ours = (tmp_path / name for name in ("once", "stock", "ours"))
    stock_losses(jobs, PRETRAIN, 4, **logged(once, **model))
    stock_losses(jobs, PRETRAIN, 4, **logged(stock, **model, **instances))
    plans = ask_at(tmp_path, (UNLIKE, 2), (REPLICAS, 6))
    job = run(jobs, ours, **model, **instances, resihp_plan=plans, resihp_inject="kill:1@9:backward")
    assert job.code == 0, job.tails()
    assert len(job.events("reconfiguration")) == 2 and len(job.summary.deaths) == 1
    expected = norms_of_parameters(stock)
    assert expected == pytest.approx([2**0.5 * each for each in norms_of_parameters(once)], rel=BF16.norm)
    assert norms_of_parameters(ours) == pytest.approx(expected, rel=BF16.norm) and len(expected) == 12


@NIGHTLY
@pytest.mark.parametrize(
    "layout",
    [UNIFORM_LAYOUT, PIPELINE | SHARED, PIPELINE | SHARED | {"bf16": True}, PIPELINE | EXPERTS | EACH_LAYER],
)
def test_logs_are_those_of_megatron_alone(jobs: Jobs, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Also the evaluations after training, which it logs as it does those before, at the same step."""
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    evaluated = {"eval_interval": 3}
    torchrun_losses(PRETRAIN, 4, **logged(stock, **layout, **evaluated))
    job = run(jobs, ours, **layout, **evaluated)
    assert job.code == 0, job.tails()
    check_files(ours, stock, 6)
    curves = tensorboard_curves(ours)
    assert [step for step, _ in curves[VALIDATED]] == [3, 6, 6, 6], "in training, then on two sets"
    assert set(of_megatron(curves)) == set(tensorboard_curves(stock)), "times and memory, too"
    assert set(of_megatron(wandb_curves(ours))) == set(wandb_curves(stock))
    texts = [set(events_in(directory).Tags()["tensors"]) for directory in (ours, stock)]
    assert texts[0] == texts[1], "Megatron's arguments, and the plugin's"


@NIGHTLY
def test_a_job_whose_logs_can_t_be_written_trains(jobs: Jobs, tmp_path: Path) -> None:
    """A directory that can't be made stands for a full disk."""
    (tmp_path / "file").touch()
    job = run(jobs, tmp_path / "file" / "logs", workers=2, wandb_project=None)
    assert job.code == 0, job.tails()
    [failed] = job.events("log_failed")
    assert failed["part"] == "TensorBoard"
    assert [line for line in job.output().splitlines() if "TensorBoard can't be written" in line]


@NIGHTLY
def test_a_profile_is_of_the_first_epoch(jobs: Jobs, tmp_path: Path) -> None:
    """A recovery in the middle of it drops it, and the job goes on."""
    profiled = {"profile": True, "use_pytorch_profiler": True, "profile_ranks": 0, "profile_step_start": 2,
                "profile_step_end": 5, **PIPELINE}  # fmt: skip
    whole = jobs.run(tiny(**profiled, tensorboard_dir=tmp_path / "whole" / "logs"), workers=4)
    assert whole.code == 0, whole.tails()
    assert (tmp_path / "whole" / "torch_profile" / "rank-0.json.gz").exists()
    mended = tmp_path / "mended" / "logs"
    job = jobs.run(tiny(**profiled, tensorboard_dir=mended, resihp_inject="kill:3@4:backward"), workers=4)
    check_training(job, whole)
    assert "--profile is over" in "".join(map(job.log, range(4)))
