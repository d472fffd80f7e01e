# SPDX-License-Identifier: Apache-2.0
"""What --resihp takes and refuses, held against Megatron's real parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import arguments, training

from megatron_resihp.config import ResihpConfig
from megatron_resihp.integration.patches.arguments import flags
from megatron_resihp.integration.support import TABLE, refusals

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
    --async-save --use-persistent-ckpt-worker --async-strategy mcore --ckpt-assume-constant-structure
    --dist-ckpt-workers 2 --save-retain-interval 100 --verify-integrity --exit-duration-in-mins 230
    --non-persistent-ckpt-type global --non-persistent-save-interval 5 --ckpt-fully-parallel-save
    --use-distributed-optimizer --overlap-param-gather --decoupled-lr 1e-3
    --decoupled-min-lr 1e-5 --check-weight-hash-across-dp-replicas-interval 10 --test-mode
    --rampup-batch-size 4 4 100
    --recompute-granularity selective --exit-interval 30 --dataloader-type single --transformer-impl local
    --tensorboard-dir logs --tensorboard-log-interval 2 --tensorboard-queue-size 100 --log-params-norm
    --log-num-zeros-in-grad --log-timers-to-tensorboard --timing-log-level 2 --log-memory-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-throughput --log-memory-interval 10 --log-device-memory-used
    --log-energy --wandb-project project --wandb-exp-name name --wandb-entity team --wandb-save-dir wandb
    --no-one-logger --profile --use-pytorch-profiler --profile-ranks 0 1 --profile-step-start 3 --profile-step-end 5
""".split()

SINCE_019 = pytest.mark.since_megatron("0.19")
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

    def run(
        *command: str, megatron: Callable[..., Any] = lambda args, defaults: args, **defaults: Any
    ) -> argparse.Namespace:
        args = parser.parse_args(command)
        args.world_size = 8
        args.virtual_pipeline_model_parallel_size = None
        args.eval_global_batch_size = args.eval_global_batch_size or args.global_batch_size
        switched_on: list[ResihpConfig] = []
        switch_on = flags.make_wrap_validate_args(lambda config, *_: switched_on.append(config))
        args = switch_on(megatron)(args, defaults)
        args.switched_on = switched_on
        return args

    return run


def refused(check: Check, capsys: pytest.CaptureFixture[str], *command: str, without: str = "") -> str:
    """The one line with which a command line is refused. `without`: a common flag to leave out."""
    with pytest.raises(SystemExit) as caught:
        check(*(word for word in COMMON if word != without), *command)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("resihp: ") and line.count("\n") == 1
    return line


def test_a_common_command_line_is_taken(check: Check) -> None:
    args = check(*COMMON, "--resihp-inject", "kill:7@3")
    assert [config.resihp_inject for config in args.switched_on] == [["kill:7@3"]]


@pytest.mark.parametrize(
    "command",
    [
        "--moe-expert-rank-capacity-factor 1",
        "--use-megatron-fsdp", "--use-torch-fsdp2", "--fp8-format hybrid", "--enable-cuda-graph",
        "--mtp-use-repeated-layer", pytest.param("--mtp-detach-heads", marks=SINCE_019),
        "--cuda-graph-impl local", "--cuda-graph-modules full_iteration",
        "--step-batch-size-schedule 8:8",
        "--defer-embedding-wgrad-compute", "--mlp-chunks-for-training 2 --transformer-impl transformer_engine",
        "--dataloader-type external", "--dataloader-type cyclic --no-data-sharding", "--inprocess-restart",
        "--qk-clip --use-distributed-optimizer", "--qk-clip --attention-output-gate",
        "--optimizer lion", "--rerun-mode report_stats", "--ckpt-format fsdp_dtensor",
        "--mla-down-proj-fusion", "--fp8-param-gather", "--fp8-recipe custom", "--fp4-format e2m1", "--fp8-output-proj",
        "--moe-router-load-balancing-type global_aux_loss",
        pytest.param("--moe-token-dispatcher-type flex --num-experts 4", marks=SINCE_019),

        "--reset-attention-mask --transformer-impl local", "--cuda-graph-scope full_iteration", "--exp-avg-dtype bf16",
        "--exp-avg-sq-dtype fp16", "--main-params-dtype fp16", "--main-grads-dtype bf16",
        "--hybrid-context-parallel", "--experimental-attention-variant dsa",
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


@pytest.mark.parametrize(
    "command",
    [
        "--moe-token-dispatcher-type flex", "--cuda-graph-scope full", "--exp-avg-dtype fp32",
        "--reset-attention-mask --transformer-impl transformer_engine", "--decrease-batch-size-if-needed",
        "--reset-attention-mask --no-create-attention-mask-in-dataloader",
        pytest.param("--reset-attention-mask --dataloader-inter-document-masking", marks=SINCE_019),
    ],
)  # fmt: skip
def test_what_does_nothing_beside_the_other_flags_is_taken(check: Check, command: str) -> None:
    assert check(*COMMON, *command.split()).switched_on


def test_switches_have_no_value_in_a_refusal(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in COMMON if word != "--sequence-parallel"]
    with pytest.raises(SystemExit):
        check(*words, "--multi-latent-attention")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--multi-latent-attention" in line]
    assert (
        "--multi-latent-attention is not supported with --resihp: " in line and "it needs --sequence-parallel" in line
    )


@pytest.mark.parametrize(
    ("command", "said", "unsaid"),
    [
        ("--expert-tensor-parallel-size 4 --num-experts 4", "let it divide --tensor-model-parallel-size", "product"),
        ("--expert-tensor-parallel-size 1 --num-experts 4", "divide its product", "let it divide"),
        (
            "--expert-tensor-parallel-size 2 --num-distributed-optimizer-instances 2",
            "beside --num-distributed-optimizer-instances; leave one of them out",
            "divide",
        ),
    ],
)
def test_only_what_is_wrong_with_members_of_an_expert_is_said(
    check: Check, capsys: pytest.CaptureFixture[str], command: str, said: str, unsaid: str
) -> None:
    with pytest.raises(SystemExit):
        check(*COMMON, *command.split())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--expert-tensor-parallel-size " in line]
    assert said in line and unsaid not in line


def test_what_a_script_sets_by_default_is_checked_too(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """`pretrain(..., args_defaults=...)` holds where no flag is given."""
    words = " ".join(COMMON).replace("--dataloader-type single", "").split()
    with pytest.raises(SystemExit):
        check(*words, dataloader_type="external")
    assert "--dataloader-type external " in capsys.readouterr().err
    assert check(*COMMON, dataloader_type="external").switched_on, "the flag counts"


def by_schedule(schedule: str) -> list[str]:
    """The common command line, of so many samples and with a schedule of batches."""
    changes = {
        "--global-batch-size 16": f"--step-batch-size-schedule {schedule}",
        "--train-iters 40": "--train-samples 160",
    }
    line = " ".join(COMMON)
    for old, new in changes.items():
        line = line.replace(old, new)
    return line.split()


def test_a_schedule_that_stays_at_its_first_size_gives_the_batch(check: Check) -> None:
    """Megatron sets another, which evaluations keep."""

    def megatron(args: argparse.Namespace, defaults: object) -> argparse.Namespace:
        args.global_batch_size = args.eval_global_batch_size = 4
        return args

    args = check(*by_schedule("0:16,1M:32"), megatron=megatron)
    assert (args.global_batch_size, args.eval_global_batch_size) == (16, 4)


def test_a_schedule_that_does_not_fit_is_refused(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    for schedule, text in {
        "0:32,1K:16": "--step-batch-size-schedule 0:32,1K:16 is",
        "0:6": "schedule, 6 is not",
        "0:16,1K:38": "schedule, 38 is not",
    }.items():
        with pytest.raises(SystemExit):
            check(*by_schedule(schedule))
        assert text in capsys.readouterr().err


def test_all_refusals_at_once(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each; the job's end names the first, and how many there are."""
    with pytest.raises(SystemExit) as caught:
        check(*COMMON, "--inprocess-restart", "--resihp-strategy", "best", "--global-batch-size", "2")
    lines = capsys.readouterr().err.splitlines()
    flags = ["--resihp-strategy", "--inprocess-restart", "--global-batch-size"]
    assert [line.split()[:2] for line in lines] == [["resihp:", flag] for flag in flags]
    assert str(caught.value.__cause__) == f"{lines[0].removeprefix('resihp: ')} (and 2 more, see its log)"


@pytest.mark.parametrize(
    ("command", "mend"),
    [
        ("--non-persistent-ckpt-type local", "use --non-persistent-ckpt-type global"),
        ("--replication", "use --non-persistent-ckpt-type global"),
        ("--exit-signal SIGUSR2", "use SIGTERM"),
        ("--ckpt-convert-format torch", "leave --resihp out"),
        ("--save-wgrads-interval 5", "leave it out"),
        ("--async-save --ckpt-format torch", "use torch_dist"),
    ],
)
def test_checkpoints_that_no_plan_can_have(
    check: Check, capsys: pytest.CaptureFixture[str], command: str, mend: str
) -> None:
    line = refused(check, capsys, *command.split())
    assert command.split()[0] in line and mend in line


def test_a_strategy_that_is_not_installed(
    check: Check, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    line = refused(check, capsys, "--async-strategy", "nvrx")
    assert "nvidia-resiliency-ext>=0.6" in line and "use --async-strategy mcore" in line


def test_weight_gradients_for_later_and_sums_that_do_not_wait_for_them(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    deferring = ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit", "2")
    line = refused(check, capsys, *deferring)
    assert "--defer-embedding-wgrad-compute with --overlap-grad-reduce" in line and "leave one of them out" in line
    at_the_end = [word for word in COMMON if word != "--overlap-grad-reduce"]
    assert check(*at_the_end, *deferring).switched_on


def test_fused_ops_and_parameters_that_are_gathered_meanwhile(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    fused = "--use-transformer-engine-op-fuser"
    line = refused(check, capsys, fused)
    assert f"{fused} with --overlap-param-gather" in line and "leave one of them out" in line
    assert check(*(word for word in COMMON if word != "--overlap-param-gather"), fused).switched_on


def test_the_launcher_heeds_signals_in_megatrons_place(check: Check) -> None:
    args = check(*COMMON, "--exit-signal-handler", "--exit-signal", "SIGINT")
    assert args.switched_on and not args.exit_signal_handler


def test_overlaps_that_no_job_has_are_off_before_megatron_validates(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses one of them where a stage has one member, which stages of other plans may have."""
    seen: list[tuple[bool, bool]] = []

    def validate(args: argparse.Namespace, defaults: Any) -> argparse.Namespace:
        seen.append((args.tp_comm_overlap, args.delay_wgrad_compute))
        return args

    args = check(*COMMON, "--tp-comm-overlap", "--delay-wgrad-compute", megatron=validate)
    assert args.switched_on and seen == [(False, False)]
    said = capsys.readouterr().out.splitlines()
    lines = [line.removeprefix("resihp: without overlap: ") for line in said if "without overlap" in line]
    assert {line.partition(":")[0] for line in lines} == {"--tp-comm-overlap", "--delay-wgrad-compute"}


def test_who_comes_back_does_not_say_again_what_the_first_worker_said(
    check: Check, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert check(*COMMON, "--tp-comm-overlap").switched_on
    assert "without overlap" not in capsys.readouterr().out


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
        (["--global-batch-size", "2"], ["--global-batch-size 2 gives 2 replicas less than one micro-batch", "give"]),
        (["--eval-global-batch-size", "2"], ["--eval-global-batch-size 2 gives 2 replicas"]),
        (["--wandb-exp-name", ""], ["--wandb-exp-name is empty", "name the run"]),
        (["--tensorboard-dir", ""], ["--use-pytorch-profiler needs --tensorboard-dir"]),
        (["--num-distributed-optimizer-instances", "2"], ["leaves each of 2 replicas", "leave it"]),
    ],
)
def test_values_that_cannot_be(
    check: Check, capsys: pytest.CaptureFixture[str], command: list[str], words: list[str]
) -> None:
    line = refused(check, capsys, *command)
    assert all(word in line for word in words)


def test_evaluations_may_have_smaller_micro_batches(check: Check) -> None:
    assert check(*COMMON, "--eval-micro-batch-size", "1", "--eval-global-batch-size", "2").switched_on


@pytest.mark.since_megatron("0.19")
def test_an_interval_that_megatron_itself_needs(
    check: Check, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parser and validation do without one."""
    without = " ".join(COMMON).replace("--eval-interval 10 ", "").split()
    with pytest.raises(SystemExit):
        check(*without, "--eval-iters", "0")
    line = capsys.readouterr().err
    assert line.startswith("resihp: --eval-interval is missing: Megatron itself divides the job's iterations by it")
    asked = SimpleNamespace(
        train_samples=None, train_iters=40, global_batch_size=16, full_validation=False, skip_train=False,
        eval_interval=None, eval_iters=0, start_eval_at_iter=None, phase_transition_iterations=None,
    )  # fmt: skip
    monkeypatch.setattr(training, "get_args", lambda: asked)
    with pytest.raises(TypeError):
        training.get_train_valid_test_num_samples()


WHOLE_LAYERS = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@pytest.mark.parametrize("more", [(), ("--hidden-dropout", "0.1", *WHOLE_LAYERS)])
def test_transformer_engines_generators(check: Check, more: tuple[str, ...]) -> None:
    assert check(*COMMON, "--te-rng-tracker", *more).switched_on


@pytest.mark.parametrize("parts", [["--recompute-granularity", "selective"], ["--recompute-activations"]])
def test_transformer_engines_generators_do_not_go_back_within_a_layer(
    check: Check, capsys: pytest.CaptureFixture[str], parts: list[str]
) -> None:
    """With Megatron's own streams that is Megatron's business."""
    command = ("--te-rng-tracker", "--hidden-dropout", "0.1", *WHOLE_LAYERS, *parts)
    assert "--te-rng-tracker has other masks" in refused(check, capsys, *command)
    assert check(*COMMON, *command, "--resihp-megatron-random-streams").switched_on


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_eight_bits_with_scales_of_the_tensor_at_hand(check: Check, recipe: str) -> None:
    assert check(*COMMON, "--fp8-format", "hybrid", "--fp8-recipe", recipe).switched_on


def test_eight_bits_with_scales_of_earlier_micro_batches(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's own choice."""
    line = refused(check, capsys, "--fp8-format", "hybrid")
    assert "--fp8-format hybrid is not supported" in line and "use --fp8-recipe tensorwise" in line


INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "1", "--overlap-p2p-communication-warmup-flush")


def two_virtual_stages(args: argparse.Namespace, defaults: Any) -> argparse.Namespace:
    """What Megatron's validation derives."""
    args.virtual_pipeline_model_parallel_size = 2
    return args


def test_interleaving(check: Check) -> None:
    """Two replicas of four micro-batches each."""
    assert check(*COMMON, *INTERLEAVED, megatron=two_virtual_stages).switched_on


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--global-batch-size 12", ["--global-batch-size 12", "3 micro-batches", "2 stages", "multiple of 2"]),
        ("--eval-global-batch-size 12", ["--eval-global-batch-size 12", "3 micro-batches"]),
        ("--microbatch-group-size-per-virtual-pipeline-stage 3", ["4 micro-batches", "groups of 3", "multiple of 3"]),
        ("--pipeline-model-parallel-layout E|tttt||L", ["chunk 2", "no layers"]),
    ],
)
def test_interleaving_that_can_not_be(
    check: Check, capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        check(*COMMON, *INTERLEAVED, *command.split(), megatron=two_virtual_stages)
    line = capsys.readouterr().err
    assert all(word in line for word in words), line


def test_overlap_that_megatron_switches_off(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own configuration of the model would raise an error on every worker."""

    def derive(args: argparse.Namespace, defaults: Any) -> argparse.Namespace:
        args.overlap_p2p_comm = False
        return args

    with pytest.raises(SystemExit):
        check(*COMMON, "--overlap-p2p-communication-warmup-flush", megatron=derive)
    assert "--overlap-p2p-communication-warmup-flush needs an interleaved pipeline" in capsys.readouterr().err


def test_gradient_descent_is_let_in_where_nothing_is_saved() -> None:
    def refused(**given: str) -> list[str]:
        return refusals(given, dict.fromkeys(given), {name: f"--{name}" for name in given})

    assert not refused(optimizer="sgd")
    for directory in ("save", "load"):
        assert "can't load what it saves" in refused(**{"optimizer": "sgd", directory: "d"})[0]


@pytest.mark.parametrize(
    ("changed", "let_in"),
    [
        ({}, True),
        ({"save": "d"}, True),
        ({"muon_tp_mode": "duplicated"}, False),
        ({"muon_scalar_optimizer": "lion"}, False),
        ({"loss_scale": 128.0}, False),
        ({"use_distributed_optimizer": True, "bf16": True}, True),
        ({"optimizer": "dist_muon", "bf16": True, "save": "d"}, True),
        ({"use_distributed_optimizer": True}, False),
        ({"optimizer": "dist_muon"}, False),
        ({"optimizer": "dist_muon", "bf16": True, "overlap_param_gather": True}, False),
        ({"optimizer": "dist_muon", "bf16": True, "ckpt_format": "torch", "load": "d"}, False),
        ({"optimizer": "dist_muon", "bf16": True, "ckpt_format": "torch"}, True),
    ],
)
def test_muon_is_let_in_where_its_step_is_each_workers_own(changed: dict[str, Any], let_in: bool) -> None:
    """Its matrices may be shared out where Megatron can step and save them, and gathers them before it goes on."""
    given = {
        "optimizer": "muon", "muon_tp_mode": "blockwise", "muon_scalar_optimizer": "adam",
        "use_distributed_optimizer": False, "loss_scale": None, "bf16": False, "ckpt_format": "torch_dist",
        "overlap_param_gather": False,
    } | changed  # fmt: skip
    assert (TABLE["optimizer"].refusal(given, {}, {"optimizer": "--optimizer"}) is None) == let_in


def test_refusals_speak_of_what_was_given() -> None:
    values = SimpleNamespace(use_torch_fsdp2=True, seed=3, optimizer="lion", new_in_megatron=0)
    lines = refusals(
        vars(values),
        {"use_torch_fsdp2": False, "seed": 1, "optimizer": "adam", "new_in_megatron": None, "lr": None},
        {name: f"--{name.replace('_', '-')}" for name in (*vars(values), "lr")},
    )
    assert lines == [
        "--new-in-megatron is not supported with --resihp: nobody has yet read what it does; leave out this flag or "
        "--resihp",
        "--optimizer lion is not supported with --resihp: use adam; or sgd without --save and --load, since Megatron "
        "can't load what it saves of it; or muon with --muon-tp-mode blockwise and --muon-scalar-optimizer adam, "
        "without --loss-scale: in other modes it communicates during the step; with --use-distributed-optimizer it "
        "needs --bf16 and --ckpt-format torch_dist, without --overlap-param-gather",
        "--use-torch-fsdp2 is not supported with --resihp: shards of parameters that exist once are lost with their "
        "worker: there are no copies of them; use --use-distributed-optimizer",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "--mtp-num-layers 1", "--hidden-dropout 0.1", "--attention-dropout 0.1", "--fp16",
        "--fp8-format e4m3 --fp8-recipe tensorwise",
        pytest.param("--dataloader-inter-document-masking", marks=SINCE_019),
        "--window-size 4,0", "--softmax-type learnable", "--multi-latent-attention",
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer", "--cp-comm-type ring",
        "--resihp-strategy recycle", "--resihp-spread-replicas", "--resihp-plan auto",
        "--moe-input-jitter-eps 0.1 --num-experts 4", "--moe-router-force-load-balancing --num-experts 4",
    ],
)  # fmt: skip
def test_what_is_refused_where_replicas_share_sequences(
    check: Check, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        check(*SHARING, *command.split())
    lines = [line for line in capsys.readouterr().err.splitlines() if command.split()[0] in line]
    assert len(lines) == 1 and ("leave" in lines[0] or "use p2p" in lines[0])


SHARING = [*COMMON, "--context-parallel-size", "2"]
MASKED = ["--eod-mask-loss", "--allow-ambiguous-pad-tokens"]


def test_sequences_may_be_shared(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(*SHARING, *MASKED, "--calculate-per-token-loss", "--cp-comm-type", "all_gather").switched_on
    experts = (word for word in (*SHARING, *EXPERTS) if word != "--calculate-per-token-loss")
    assert check(*experts, "--disable-bias-linear").switched_on
    with pytest.raises(SystemExit):
        check(*SHARING, "--context-parallel-size", "3")
    assert "8 workers are not a multiple of TP x CP x PP = 12" in capsys.readouterr().err


@pytest.mark.parametrize("flag", MASKED)
def test_tokens_that_are_masked_need_a_loss_by_tokens(
    check: Check, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    line = refused(check, capsys, "--context-parallel-size", "2", flag, without="--calculate-per-token-loss")
    assert f"beside {flag}: Megatron divides losses by each worker's own tokens" in line


EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]


ALONE = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
NOT_HELD = ("--bf16", "--sequence-parallel", "--use-distributed-optimizer", "--overlap-param-gather")
IN_FP32 = [word for word in " ".join(COMMON).replace("--save out ", "").split() if word not in NOT_HELD]


@pytest.mark.parametrize(
    "command",
    [
        "--expert-tensor-parallel-size 1", "--bf16", "--fp16", "--hidden-dropout 0.1 --moe-input-jitter-eps 0.1",
        "--moe-expert-capacity-factor 1", "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
        "--moe-token-dispatcher-type allgather", "--pipeline-model-parallel-size 2",
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2", marks=SINCE_019
        ),
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "--save out",
        "--save out --use-distributed-optimizer",
        pytest.param(
            "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel", marks=SINCE_019
        ),
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer",
        "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "--ddp-average-in-collective",
    ],
)  # fmt: skip
def test_experts_may_be_shared(check: Check, command: str) -> None:
    """The job's loss is one per token, which 0.18 weighs rightly with TP 1 only."""
    assert check(*IN_FP32, *EXPERTS, *ALONE, *command.split()).switched_on


@pytest.mark.parametrize(
    "command",
    [
        "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel",
        "--expert-tensor-parallel-size 2",
        "--resihp-spread-replicas", "--resihp-strategy recycle",
        "--context-parallel-size 2 --num-experts 12 --expert-model-parallel-size 3",
        "--context-parallel-size 4 --num-experts 12 --expert-model-parallel-size 6",
        "--ddp-average-in-collective --num-experts 12 --expert-model-parallel-size 3",
    ],
)  # fmt: skip
def test_what_no_test_holds_where_experts_are_shared(
    check: Check, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        check(*IN_FP32, *EXPERTS, *ALONE, *command.split())
    assert command.split()[0] in capsys.readouterr().err


def test_balance_that_megatron_018_weighs_by_a_workers_own_tokens() -> None:
    values = {
        "calculate_per_token_loss": True, "num_experts": 4, "tensor_model_parallel_size": 1, "context_parallel_size": 2,
    }  # fmt: skip
    row = TABLE["calculate_per_token_loss"]
    flags = {"calculate_per_token_loss": "--calculate-per-token-loss"}
    line = row.refusal(values, {}, flags)
    assert line is not None and "use 0.19" in line
    for fits in (
        {"dataloader_inter_document_masking": False}, {"calculate_per_token_loss": False}, {"num_experts": None},
        {"context_parallel_size": 1},
    ):  # fmt: skip
        assert row.refusal(values | fits, {}, flags) is None


def test_biases_of_shared_experts(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check(*(word for word in IN_FP32 if word != "--disable-bias-linear"), *EXPERTS, *ALONE)
    assert "needs --disable-bias-linear with --resihp" in capsys.readouterr().err
