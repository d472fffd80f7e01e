# SPDX-License-Identifier: Apache-2.0
"""`resihp plan`: sizes or a run directory and a health in; tables, JSON and a picture out; bad input in one line."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_resihp.cli import command_parser, main
from megatron_resihp.cost.device import NETWORK_BANDWIDTH
from megatron_resihp.cost.fitted.fit import fit
from megatron_resihp.cost.fitted.model import CostModel
from megatron_resihp.cost.fitted.store import save
from megatron_resihp.cost.running import cost_of_job
from megatron_resihp.lab.strategies import FOR_SHARERS as BASELINES
from megatron_resihp.plan import ParallelPlan, even_chunks, spelled_out
from megatron_resihp.plan.rules import Sharing
from megatron_resihp.plan.slots import renamed
from megatron_resihp.planner.bridge import strategy_named
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health
from megatron_resihp.planner.strategies.registry import FOR_SHARERS, STRATEGIES
from megatron_resihp.protocol.planning import KnownJob
from megatron_resihp.report.plan.source import megatron_arguments, source_of

SIZES = ("--model", "llama2-7b", "--gpus", 16, "--tp", 4, "--pp", 2, "--micro-batches", 8)


def plan(*arguments: Any) -> int:
    return main(["plan", *map(str, arguments)])


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_strategies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SIZES, "--dead", 5, "--compare") == 0
    shown = capsys.readouterr().out
    assert "dead: 5" in shown and "now stopped" in shown
    assert not [name for name in STRATEGIES if f"\n {name} " not in shown]


def test_the_plan_in_json_leaves_the_dead_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SIZES, "--dead", "5,12-13", "--slow", "1=0.5", "--strategy", "drop-replica", "--json") == 0
    found = as_json(capsys)
    assert (found["dead"], found["slow"], found["unmitigated_samples_per_s"]) == ([5, 12, 13], {"1": 0.5}, None)
    answer = found["strategies"]["drop-replica"]
    assert not {5, 12, 13} & set(ParallelPlan.from_dict(answer["plan"]).members)
    assert 0 < answer["samples_per_s"] < found["healthy_samples_per_s"]
    assert 0 < answer["share_of_bound"] <= 1
    assert answer["differences"]
    # The replica that is left holds all that it needs, and only builds new groups.
    assert (answer["bytes_to_move"], answer["moving_s"]) == (0, 2.0)


def test_with_everybody_well_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SIZES, "--strategy", "drop-replica") == 0
    shown = capsys.readouterr().out
    assert "all workers are healthy" in shown and "nothing to change" in shown


def test_a_change_has_to_pay_until_the_next_event(capsys: pytest.CaptureFixture[str]) -> None:
    for hours, changes in ((1e-4, False), (1, True)):
        slow = ("--slow", "1=0.5", "--strategy", "joint", "--until-next-event", hours)
        assert plan(*SIZES, *slow, "--json") == 0
        assert bool(as_json(capsys)["strategies"]["joint"]["differences"]) is changes


def test_networks_are_as_fast_as_running_jobs_assume() -> None:
    by_sizes = source_of(command_parser().parse_args(["plan", *map(str, SIZES)]))
    assert by_sizes.cost.device.bandwidth == NETWORK_BANDWIDTH


def test_no_plan_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SIZES, "--dead", "0-12", "--strategy", "drop-replica") == 1
    assert "no plan: " in capsys.readouterr().out


def test_plans_with_migrations_are_drawn_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--model", "llama2-13b", "--gpus", 32, "--tp", 4, "--pp", 4, "--micro-batches", 16)
    picture = tmp_path / "plan.png"
    assert plan(*sizes, "--dead", "4-7", "--slow", "9=0.5", "--strategy", "resihp-paper", "--plot", picture) == 0
    assert "run in another replica: " in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_timelines_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SIZES, "--dead", 5, "--strategy", "drop-replica", "--plot", tmp_path / "plan.png") == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan() == 2
    assert "--slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama9-1b", "--gpus", 8), "unknown model 'llama9-1b'"),
        (("--gpus", 8), "--model is missing"),
        (("--model", "llama2-7b", "--gpus", 4, "--tp", 4, "--pp", 2), "4 GPUs are too few"),
        (("--model", "llama2-7b", "--gpus", 17, "--tp", 4, "--pp", 2), "not a multiple"),
        (("--model", "llama2-7b", "--gpus", 16, "--tp", 4, "--pp", 2, "--dp", 3), "not TP 4 × PP 2 × DP 3"),
        *(
            ((*SIZES, f"--{name}", value), f"--{name} must be at least 1")
            for name in (
                "gpus",
                "tp",
                "pp",
                "dp",
                "micro-batches",
                "micro-batch-size",
                "seq-length",
                "workers-per-node",
            )
            for value in (0, -1, 10**12)
        ),
        *(
            ((*SIZES, f"--{name}", value, "--json"), f"--{name} must be above 0")
            for name in ("memory-gib", "tflops", "gbps", "until-next-event")
            for value in (0, -1, "nan", "inf", 1e308, 1e-308)
        ),
        (("--model", "llama2-7b", "--gpus", 16, "--tp", 16), "TP groups of 16 don't fit into nodes of 8"),
        (("--model", "llama2-70b", "--gpus", 8, "--tp", 8), "; give more GPUs, --distributed-optimizer, --"),
        (("--model", "llama2-7b", "--gpus", 80, "--pp", 40), "40 stages are more than"),
        (("--model", "llama2-7b", "--gpus", 16, "--micro-batches", 4), "fewer than 16 replicas"),
        ((*SIZES, "--slow", "3=0"), "speed 0"),
        ((*SIZES, "--slow", "3=1.5"), "speed 1.5"),
        ((*SIZES, "--slow", "3=nan"), "speed nan"),
        ((*SIZES, "--slow", "3"), "--slow 3 can't be read"),
        ((*SIZES, "--slow", "3=0.5", "1-4=0.7"), "--slow names worker 3 twice"),
        ((*SIZES, "--dead", "3", "--slow", "3=0.5"), "worker 3 is given as dead and as slow"),
        ((*SIZES, "--dead", "16"), "worker 16"),
        ((*SIZES, "--dead", "3", "3"), "names worker 3 twice"),
        ((*SIZES, "--dead", "x"), "--dead x can't be read"),
        ((*SIZES, "--dead", "15-8"), "--dead 15-8 ends before it begins; give the lower worker first, as in 8-15"),
        ((*SIZES, "--dead", "0-99999999999"), "--dead names worker 99999999999; the job's live workers are 0–15"),
        ((*SIZES, "--slow", "7-4=0.5"), "--slow 7-4=0.5 ends before it begins"),
        ((*SIZES, "--slow", "0-99999999999=0.5"), "--slow names worker 99999999999"),
        ((*SIZES, "--dead", "0-15"), "all workers are dead"),
        ((*SIZES, "--link", "3-3=0.5"), "--link 3-3=0.5 can't be read"),
        ((*SIZES, "--link", "3-4=2"), "link 3-4 has speed 2"),
        ((*SIZES, "--link", "3-4=0.5", "4-3=0.5"), "link 3-4 twice"),
        ((*SIZES, "--dead", "3", "--link", "3-4=0.5"), "worker 3 is given as dead and as an end"),
        ((*SIZES, "--strategy", "uniform"), "only for --cp and --ep; `drop-replica` comes closest"),
        ((*SIZES, "--strategy", "prayer"), "unknown strategy 'prayer'"),
        (("missing-run",), "missing-run does not exist; give the run directory of a started run"),
        (("--dead", 3, "missing-run"), "missing-run does not exist; give the run directory of a started run"),
        ((*SIZES, "--strategy", "jont"), "unknown strategy 'jont'; do you mean joint? known are "),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[Any, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("resihp: ") and told.count("\n") == 1


SMALL: dict[str, Any] = {"replicas": [{"stages": [[0]], "micro_batches": [0]}], "standbys": {}}


def write_run(run_dir: Path, command: list[str], plans: list[dict[str, Any]], *told: dict[str, Any]) -> Path:
    run_dir.mkdir()
    started = {
        "time": 0.0, "epoch": 0, "worker": None, "event": "run_started", "world_size": 8,
        "nproc_per_node": 8, "most_nodes": 1, "command": command,
    }  # fmt: skip
    epochs = [
        {"time": 1.0 + number, "epoch": number, "worker": None, "event": "epoch_started", "plan": each}
        for number, each in enumerate(plans)
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [started, *told, *epochs]))
    return run_dir


COMMAND = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --disable-bias-linear "
    "--max-position-embeddings 128 --micro-batch-size 1 --vocab-size 127 --lr 1e-3 --bf16 --resihp-inject a b"
).split()


LARGE = (
    "train.py --num-layers 4 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096 "
    "--max-position-embeddings 4096"
).split()


FOUR: dict[str, Any] = {"replicas": [{"stages": [[0, 1, 2, 3]], "micro_batches": [0, 1]}], "standbys": {}}


def test_a_running_job_is_offered_what_it_can_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", LARGE, [FOUR])
    assert plan("--dead", 3, run_dir, "--json") == 0
    found = ParallelPlan.from_dict(as_json(capsys)["strategies"]["joint"]["plan"])
    assert 3 not in found.members and not found.uneven_shards


def test_a_worker_that_was_started_anew_is_where_its_predecessor_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker 11 has the place of worker 3, on the node of the others, and not one on a second node."""
    answers = []
    for worker in (3, 11):
        running = {"replicas": [{"stages": [[0, 1, 2, worker]], "micro_batches": [0, 1]}], "standbys": {}}
        run_dir = write_run(tmp_path / f"with-{worker}", LARGE, [running])
        assert plan(run_dir, "--slow", "1=0.9", "--json") == 0
        answers.append(ParallelPlan.from_dict(as_json(capsys)["strategies"]["joint"]["plan"]))
    assert renamed(answers[0], lambda worker: 11 if worker == 3 else worker) == answers[1]


def test_plans_that_no_job_can_run_yet_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--model", "llama2-7b", "--tp", 4, "--micro-batches", 2, "--memory-gib", 160)
    assert plan(*sizes, "--dead", 3, "--uneven") == 0
    shown = capsys.readouterr().out
    assert shown.count("members of a stage hold unequal shards: no job can run this plan yet\n") == 1
    assert plan(*sizes, "--dead", 3) == 0
    assert "unequal shards" not in capsys.readouterr().out, "unless they are asked for"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_plans_is_shown_on_a_terminal_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*SIZES, "--strategy", "drop-replica", "--json")
    assert plan(*arguments) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert plan(*arguments) == 0
    assert "drop-replica" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert list(json.loads(capsys.readouterr().out)) == list(json.loads(quiet.out))


def test_a_runs_last_plan_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"replicas": [{"stages": [[0, 1], [4, 5]], "micro_batches": [0, 2]},
                          {"stages": [[2, 3], [6, 7]], "micro_batches": [1, 3]}], "standbys": {}}  # fmt: skip
    last = {"replicas": [{"stages": [[0, 1], [6, 7]], "micro_batches": [0, 1, 2, 3]}], "standbys": {"2": None}}
    run_dir = write_run(tmp_path / "run", COMMAND, [first, last])
    assert plan(run_dir, "--slow", "7=0.5", "--strategy", "drop-replica", "--json") == 0
    found = as_json(capsys)
    assert found["live"] == 5
    assert found["plan"]["replicas"][0]["chunks"] == [[0, 0, 3], [1, 3, 6]]
    assert found["unmitigated_samples_per_s"] < found["healthy_samples_per_s"]


ARGUMENTS = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "max_position_embeddings": 128,
    "padded_vocab_size": 128, "micro_batch_size": 1, "bf16": True, "add_bias_linear": False,
}  # fmt: skip
TWO_STAGES = {"replicas": [{"stages": [[0], [1]], "micro_batches": [0, 1, 2, 3]}], "standbys": {}}


def told(emulated: str | None) -> list[dict[str, Any]]:
    """What workers have told of a job of two stages."""
    event = {"time": 0.5, "epoch": 0, "worker": None}
    job = {
        "tensor_parallel": 1, "pipeline_parallel": 2, "chunks": [[0, 0, 3], [1, 3, 6]], "micro_batches": 4,
        "global_batch_size": 4, "train_iters": 10, "emulated": emulated, "device_memory": None,
    }  # fmt: skip
    return [{**event, "event": "job", **job}, {**event, "event": "model", "arguments": ARGUMENTS}]


def test_costs_are_those_of_the_runs_emulated_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", COMMAND, [TWO_STAGES], *told("h800"))
    assert plan(run_dir, "--slow", "1=0.5", "--json") == 0
    found = as_json(capsys)
    assert found["costs"] == "of the emulated device h800"
    job = told("h800")[0]
    known = KnownJob(job["tensor_parallel"], job["micro_batches"], ARGUMENTS, job["emulated"])
    cost = cost_of_job(known, 8, 8, even_chunks(4, 2), None)
    in_force = spelled_out(ParallelPlan.from_dict(TWO_STAGES), even_chunks(4, 2))
    healthy = evaluate(in_force, Health({0: 1.0, 1: 1.0}), cost)
    assert found["healthy_samples_per_s"] == pytest.approx(healthy.samples_per_s)
    assert found["strategies"]["joint"]["all_well_samples_per_s"] >= healthy.samples_per_s


def test_costs_are_those_that_the_run_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", COMMAND, [TWO_STAGES], *told(None))
    assert plan(run_dir, "--strategy", "drop-replica") == 0
    assert "costs: from FLOPs and a device of 312 TFLOP/s" in capsys.readouterr().out, "nothing was measured yet"
    # F takes half a second in both stages, whatever is in the micro-batch, and B one.
    tokens, squares = np.full(30, 128.0), np.full(30, 128.0 * 128)
    seconds = np.array([[[[0.5]], [[1.0]], [[np.nan]]]] * 2) * np.ones(30)
    nothing = fit(tokens, squares, np.full(seconds.shape, np.nan))
    collectives = replace(nothing, gamma=np.zeros(seconds.shape[:-1]))
    save(CostModel(fit(tokens, squares, seconds), collectives), run_dir / "cost_model.json")
    assert plan(run_dir, "--strategy", "drop-replica", "--json") == 0
    found = as_json(capsys)
    assert found["costs"] == f"as the run has measured them, from {run_dir / 'cost_model.json'}"
    assert found["healthy_samples_per_s"] == pytest.approx(4 / (5 * 1.5), rel=1e-3)


def test_a_run_without_its_models_sizes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(write_run(tmp_path / "run", ["train.py"], [SMALL]), "--compare") == 2
    assert "the job's flags don't give the model's sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--model", "llama2-7b", "--tp", 8), "--model"),
        (("--tp", 1), "--tp"),
        (("--micro-batches", 99), "--micro-batches"),
        (("--recompute", "none"), "--recompute"),
        (("--sequence-parallel",), "--sequence-parallel"),
    ],
)
def test_a_runs_sizes_are_not_given_by_flags(
    tmp_path: Path, flags: tuple[Any, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(write_run(tmp_path / "run", COMMAND, [SMALL]), *flags) == 2
    told = capsys.readouterr().err
    assert told == f"resihp: {named} and RUN_DIR both give the job's sizes; leave out one of them\n"


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        ([{"replicas": [{"stages": [[0]]}], "standbys": {}}], "the plan lacks 'micro_batches'"),
        ([{"replicas": [{"stages": [[0]], "micro_batches": [0]}]}], "the plan lacks 'standbys'"),
        ([{}], "its plan (epoch_started has the wrong type of plan: expected plan)"),
        ([None], "its plan (epoch_started lacks plan)"),
    ],
)
def test_a_run_whose_plan_is_damaged_is_told(
    tmp_path: Path, plans: list[Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(write_run(tmp_path / "run", COMMAND, plans)) == 2
    told = capsys.readouterr().err
    assert said in told and "events.jsonl" in told and told.startswith("resihp: ") and told.count("\n") == 1


def test_flags_are_read_as_megatron_reads_them() -> None:
    arguments = megatron_arguments(COMMAND)
    assert arguments["num_layers"] == 4 and arguments["lr"] == 1e-3 and arguments["bf16"] is True
    assert arguments["add_bias_linear"] is False and "disable_bias_linear" not in arguments
    assert arguments["resihp_inject"] == ["a", "b"]


EXPERTS = ("--model", "mixtral-8x7b", "--gpus", 32, "--tp", 2, "--pp", 4, "--ep", 4, "--micro-batches", 16,
           "--sequence-parallel", "--distributed-optimizer")  # fmt: skip
SEQUENCES = ("--model", "llama2-7b", "--gpus", 16, "--tp", 2, "--pp", 2, "--cp", 2, "--seq-length", 8192,
             "--micro-batches", 8, "--sequence-parallel", "--distributed-optimizer")  # fmt: skip


SHARED = "--num-experts 4 --expert-model-parallel-size 4".split()
FOUR_SHARE: dict[str, Any] = {
    "replicas": [{"stages": [[each], [each + 4]], "micro_batches": [2 * each, 2 * each + 1]} for each in range(4)],
    "standbys": {}, "expert_parallel": 4,
}  # fmt: skip
OF_EXPERTS = {"num_experts": 4, "expert_model_parallel_size": 4}
SHARINGS = ((1, 4, 0), (1, 2, 0), (1, 1, 0))


def known_sharers(emulated: str | None) -> KnownJob:
    return KnownJob(1, 8, ARGUMENTS | OF_EXPERTS, emulated, sharings=tuple(Sharing(*each) for each in SHARINGS))


def told_of_sharers(emulated: str | None) -> list[dict[str, Any]]:
    """What workers have told of a job in which four replicas of two stages share experts."""
    job, model = told(emulated)
    return [
        job | {"micro_batches": 8, "global_batch_size": 8, "sharings": SHARINGS},
        model | {"arguments": ARGUMENTS | OF_EXPERTS},
    ]


class TestOfSharers:
    """Jobs whose replicas share experts or sequences."""

    @pytest.mark.parametrize(("sizes", "layout"), [(EXPERTS, "TP 2 × PP 4 × DP 4, EP 4 × ETP 2"),
                                                   (SEQUENCES, "TP 2 × CP 2 × PP 2 × DP 2,")])  # fmt: skip
    def test_strategies_that_can_are_compared(
        self, sizes: tuple[Any, ...], layout: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert plan(*sizes, "--dead", 5, "--slow", "9=0.5", "--compare") == 0
        shown = capsys.readouterr().out
        assert layout in shown
        assert not [name for name in (*FOR_SHARERS, *BASELINES) if f" {name} " not in shown]
        [line] = [line for line in shown.splitlines() if "no plans of jobs whose replicas share" in line]
        assert {name for name in STRATEGIES if name in line} == STRATEGIES.keys() - BASELINES.keys()

    def test_the_plan_says_who_shares(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan(*EXPERTS, "--dead", 5, "--json") == 0
        found = as_json(capsys)
        assert found["plan"]["expert_parallel"] == 4 and "left_out" not in found
        answer = found["strategies"]["by-speed"]
        assert 5 not in ParallelPlan.from_dict(answer["plan"]).members
        assert 0 < answer["share_of_bound"] <= 1

    def test_experts_may_be_shared_inside_a_stage(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert plan(*EXPERTS, "--etp", 1, "--json") == 0
        found = as_json(capsys)["plan"]
        assert (found["expert_parallel"], found["expert_members"]) == (2, 1)

    def test_a_picture_is_drawn(self, tmp_path: Path) -> None:
        assert plan(*EXPERTS, "--dead", 5, "--plot", tmp_path / "plan.png") == 0
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

    def test_a_running_job_is_offered_what_its_own_planner_finds(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_dir = write_run(tmp_path / "run", [*COMMAND, *SHARED], [FOUR_SHARE], *told_of_sharers("h800"))
        assert plan(run_dir, "--slow", "2=0.5", "--json") == 0
        found = as_json(capsys)
        assert found["costs"] == "of the emulated device h800"
        after = ParallelPlan.from_dict(found["strategies"]["by-speed"]["plan"])
        cost = cost_of_job(known_sharers("h800"), 8, 8, even_chunks(4, 2), None)
        before = spelled_out(ParallelPlan.from_dict(FOUR_SHARE), even_chunks(4, 2))
        slow = Health(dict.fromkeys(range(8), 1.0) | {2: 0.5})
        own = strategy_named("joint", shares=True)(before, slow, cost)
        assert own != before and after == own

    def test_a_run_that_measured_nothing_has_costs_from_flops(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run_dir = write_run(tmp_path / "run", [*COMMAND, *SHARED], [FOUR_SHARE], *told_of_sharers(None))
        seconds = []
        for tflops in (100, 200):
            assert plan(run_dir, "--dead", 3, "--tflops", tflops, "--compare", "--json") == 0
            found = as_json(capsys)
            assert found["costs"].startswith("from FLOPs") and found["strategies"].keys() > {"by-speed", "uniform"}
            plans = [ParallelPlan.from_dict(each["plan"]) for each in found["strategies"].values() if "plan" in each]
            assert not [each for each in plans if 3 in each.members]
            seconds.append(found["strategies"]["uniform"]["iteration_s"])
        assert seconds[0] > seconds[1]

    def test_a_run_that_did_not_say_who_may_share_is_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job, model = told_of_sharers(None)
        for name, said in ("silent", ()), ("of an earlier version", (job | {"sharings": None}, model)):
            run_dir = write_run(tmp_path / name, [*COMMAND, *SHARED], [FOUR_SHARE], *said)
            assert plan(run_dir) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert "doesn't say how replicas share; give the directory of a run that trained" in line

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                (*EXPERTS, "--strategy", "joint"),
                "joint plans no jobs whose replicas share experts or sequences; choose",
            ),
            ((*SIZES, "--strategy", "rectangles"), "rectangles plans only jobs whose replicas share"),
            ((*EXPERTS, "--strategy", "rectangle"), "unknown strategy 'rectangle'; do you mean rectangles?"),
            ((*EXPERTS, "--ep", 3), "EP 3 can't share the 8 experts of a layer evenly"),
            ((*SIZES, "--ep", 2), "EP 2 can't share the 0 experts of a layer evenly"),
            ((*EXPERTS, "--etp", 3), "ETP 3 doesn't divide TP 2"),
            ((*EXPERTS, "--ep", 1, "--etp", 1), "EP 1 x ETP 1 isn't a multiple of TP 2"),
            ((*EXPERTS, "--ep", 8), "4 replicas can't share experts in groups of 8"),
            ((*SIZES, "--cp", 3), "too few for one replica of TP 4 × CP 3 × PP 2"),
            ((*SEQUENCES, "--seq-length", 8190), "2 replicas can't share the 8190 tokens of a sequence evenly"),
            ((*SIZES, "--cp", 0), "--cp must be at least 1"),
        ],
    )
    def test_bad_input_gets_one_line(
        self, arguments: tuple[Any, ...], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        test_bad_input_gets_one_line(arguments, said, capsys)
