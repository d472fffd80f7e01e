# SPDX-License-Identifier: Apache-2.0
"""What --resihp takes and refuses, held against Megatron's real parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import arguments

from megatron_resihp.config import ResihpConfig
from megatron_resihp.integration.patches import flags
from megatron_resihp.integration.patches.support import ALLOWED, CONSTRAINTS, refusals

COMMON = """
    --resihp --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 4
    --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --disable-bias-linear --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16
    --train-iters 40 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
    --adam-beta2 0.95 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --bf16 --seed 7
    --overlap-grad-reduce --calculate-per-token-loss --data-path data/code --split 90,10,0 --num-workers 2
    --tokenizer-type NullTokenizer --vocab-size 255 --save out --load out --save-interval 10 --eval-interval 10
    --eval-iters 2 --log-interval 1 --ckpt-format torch_dist --distributed-backend gloo --use-tp-pp-dp-mapping
    --recompute-granularity selective --exit-interval 30 --dataloader-type single --transformer-impl local
    --tensorboard-dir logs --tensorboard-log-interval 2 --tensorboard-queue-size 100 --log-params-norm
    --log-num-zeros-in-grad --log-timers-to-tensorboard --timing-log-level 2 --log-memory-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-throughput --log-memory-interval 10 --log-device-memory-used
    --log-energy --wandb-project project --wandb-exp-name name --wandb-entity team --wandb-save-dir wandb
    --no-one-logger --profile --use-pytorch-profiler --profile-ranks 0 1 --profile-step-start 3 --profile-step-end 5
""".split()

Check = Callable[..., argparse.Namespace]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with our flags, as the patch makes it."""
    add = flags.wrap_add_megatron_arguments(arguments.add_megatron_arguments)
    return add(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def check(parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Parses a command line and validates it for 8 workers; what Megatron would validate itself is left out."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "code.idx").touch()
    monkeypatch.chdir(tmp_path)

    def run(*command: str, megatron: Callable[..., Any] = lambda args, defaults: args) -> argparse.Namespace:
        args = parser.parse_args(command)
        args.world_size = 8
        args.virtual_pipeline_model_parallel_size = None
        args.eval_global_batch_size = args.eval_global_batch_size or args.global_batch_size
        switched_on: list[ResihpConfig] = []
        switch_on = flags.make_wrap_validate_args(lambda config, *_: switched_on.append(config))
        args = switch_on(megatron)(args, {})
        args.switched_on = switched_on
        return args

    return run


def refused(check: Check, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line with which a command line is refused."""
    with pytest.raises(SystemExit) as caught:
        check(*COMMON, *command)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("resihp: ") and line.count("\n") == 1
    return line


def test_every_name_in_the_list_is_an_argument_of_megatron() -> None:
    known = vars(arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args([]))
    assert not ALLOWED - set(known), "a typo, or Megatron has dropped it"
    assert not set(CONSTRAINTS) - ALLOWED


def test_megatrons_defaults_are_taken(check: Check, parser: argparse.ArgumentParser) -> None:
    defaults = vars(parser.parse_args([]))
    assert refusals(defaults, defaults, {name: name for name in defaults}) == []


def test_a_common_command_line_is_taken(check: Check) -> None:
    args = check(*COMMON, "--resihp-inject", "kill:7@3")
    assert [config.resihp_inject for config in args.switched_on] == [["kill:7@3"]]


@pytest.mark.parametrize(
    "command",
    [
        "--expert-model-parallel-size 2", "--moe-grouped-gemm", "--context-parallel-size 2", "--use-megatron-fsdp",
        "--use-torch-fsdp2", "--mtp-num-layers 1", "--fp8-format hybrid", "--enable-cuda-graph",
        "--cuda-graph-impl local", "--rampup-batch-size 4 4 100", "--async-save", "--overlap-param-gather",
        "--dataloader-type cyclic", "--dataloader-type external", "--fp16", "--inprocess-restart",
        "--fp16-lm-cross-entropy",
        "--optimizer sgd", "--rerun-mode report_stats", "--ckpt-format fsdp_dtensor",
        "--num-layers-per-virtual-pipeline-stage 1", "--multi-latent-attention",
        "--moe-router-load-balancing-type global_aux_loss", "--moe-token-dispatcher-type flex",
        "--moe-router-enable-expert-bias", "--expert-tensor-parallel-size 1",
        "--hierarchical-context-parallel-sizes 2 2", "--log-straggler", "--log-max-attention-logit",
    ],
)  # fmt: skip
def test_what_is_not_known_to_work_is_refused_by_name(
    check: Check, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    flag, *values = command.split()
    try:
        line = refused(check, capsys, flag, *values)
    except SystemExit:  # argparse's own refusal: not a value that Megatron takes
        pytest.fail(f"Megatron does not know {command}")
    assert f"{flag} " in line
    assert "leave" in line or "only" in line or "use " in line, "says what to do instead"


def test_all_refusals_at_once(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(check, capsys, "--inprocess-restart", "--async-save")
    assert "--inprocess-restart" in line and "--async-save" in line


def test_half_precision_needs_sums_in_single(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--fp16 is only supported with --accumulate-allreduce-grads-in-fp32" in refused(check, capsys, "--fp16")
    assert check(*COMMON, "--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "65536").switched_on


def test_without_the_plugin_everything_is_megatrons_business(check: Check) -> None:
    args = check("--fp16", "--num-experts", "4", "--resihp-inject", "nonsense")
    assert args.switched_on == []


def test_arguments_are_checked_before_megatron_derives_others(check: Check) -> None:
    def derive(args: argparse.Namespace, defaults: Any) -> argparse.Namespace:
        args.use_megatron_fsdp = True
        return args

    assert check(*COMMON, megatron=derive).switched_on


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--resihp-inject", "kill:8@3"], ["--resihp-inject names worker 8", "0..7"]),
        (["--resihp-inject", "kill:3"], ["'kill:3' is not ACTION:WORKER@ITERATION"]),
        (["--global-batch-size", "2"], ["--global-batch-size 2 gives 2 replicas less than one micro-batch", "raise"]),
        (["--eval-global-batch-size", "2"], ["--eval-global-batch-size 2 gives 2 replicas"]),
        (["--wandb-exp-name", ""], ["--wandb-exp-name is empty", "name the run"]),
        (["--tensorboard-dir", ""], ["--use-pytorch-profiler needs --tensorboard-dir"]),
    ],
)
def test_values_that_cannot_be(
    check: Check, capsys: pytest.CaptureFixture[str], command: list[str], words: list[str]
) -> None:
    line = refused(check, capsys, *command)
    assert all(word in line for word in words)


def test_interleaving_that_megatron_derives(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """From a layout string, for one: only validation tells the number of virtual stages."""

    def derive(args: argparse.Namespace, defaults: Any) -> argparse.Namespace:
        args.virtual_pipeline_model_parallel_size = 2
        return args

    with pytest.raises(SystemExit):
        check(*COMMON, megatron=derive)
    assert "interleaved" in capsys.readouterr().err


def test_refusals_speak_of_what_was_given() -> None:
    values = SimpleNamespace(async_save=True, seed=3, optimizer="sgd", new_in_megatron=0)
    lines = refusals(
        vars(values),
        {"async_save": False, "seed": 1, "optimizer": "adam", "new_in_megatron": None, "lr": None},
        {name: f"--{name.replace('_', '-')}" for name in ("async_save", "seed", "optimizer", "new_in_megatron", "lr")},
    )
    assert lines == [
        "--async-save is not known to work with --resihp; leave one of the two out",
        "--new-in-megatron is not known to work with --resihp; leave one of the two out",
        "--optimizer sgd is not supported with --resihp: only adam's state is known to move",
    ]
