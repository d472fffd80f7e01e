# SPDX-License-Identifier: Apache-2.0
"""Real Megatron jobs for the tests: launched for real, but forked from one process that has imported everything once.

The test runner starts that process, `nursery.py`, and asks it for jobs line by line; so the runner itself stays free of
torch's threads and Megatron's state. Each job is a launcher in a process of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from launched import is_alive
from nursery import DUMP_SIGNAL

from megatron_resihp.control.transport.access.secret import VARIABLE as SECRET
from megatron_resihp.events.log import FILE_NAME, read_events
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.slices import TIED
from megatron_resihp.report.run.summary import RunSummary, compare, summarize_log

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN = REPOSITORY / "scripts" / "pretrain_gpt.py"
WISHING = Path(__file__).with_name("wishing_gpt.py")
NURSERY = Path(__file__).with_name("nursery.py")
WARM_UP_S = 120.0
NODES_SECRET = "of jobs of several nodes in tests"
JOB_S = 90.0
"""Longer than any job of these tests takes on two cores that others use too."""
DUMP_S = 3.0
TAIL_LINES = 40


# ---- what the tests use


@dataclass
class Job:
    """A launched job, running or over.

    Attributes:
        code: the launcher's exit code, once it is over.
        seconds: from the request to the launcher's end.
        cpu_s: what launcher and workers have computed, once it is over.
    """

    nursery: Nursery
    run_dir: Path
    workers: int
    started_at: float
    judge_fails: bool = False
    pid: int | None = None
    code: int | None = None
    seconds: float = 0.0
    cpu_s: float = 0.0

    def wait(self, timeout_s: float = JOB_S, meanwhile: Callable[[], None] = lambda: None) -> Job:
        """Wait for the launcher's end and check that nothing of the job is left running, and that no part of the
        coordinator has given up.

        Args:
            meanwhile: called again and again.
        """

        def over() -> bool:
            meanwhile()
            return self.code is not None

        if not self.nursery.serve_until(over, self.started_at + timeout_s):
            running = [worker for worker, pid in self.worker_pids().items() if is_alive(pid)]
            self._ask_where_they_hang()
            self.kill()
            raise AssertionError(
                f"the job did not end within {timeout_s:g} s; workers {running} still ran\n{self.tails()}"
            )
        left = [worker for worker, pid in self.worker_pids().items() if is_alive(pid)]
        assert not left, f"workers {left} outlived the launcher"
        # Training goes on without them, so that nothing else would show it.
        given_up = [*self.events("detection_failed"), *self.events("policy_failed")]
        assert self.judge_fails or not given_up, given_up
        return self

    def await_event(self, name: str, timeout_s: float = JOB_S, **fields: Any) -> dict[str, Any]:
        """Wait for an event with these fields."""

        def find() -> dict[str, Any] | None:
            return next((event for event in self.events(name) if fields.items() <= event.items()), None)

        def over() -> Any:
            return find() or self.code is not None

        found = self.nursery.serve_until(over, time.monotonic() + timeout_s) and find()
        if not found:
            if self.code is None:
                self._ask_where_they_hang()
            self.kill()
            raise AssertionError(f"no event {name} {fields}; exit code {self.code}\n{self.tails()}")
        return found

    def await_exit(self, worker: int, timeout_s: float = 10.0) -> None:
        """Wait until a worker of a running job has ended."""
        if not self.nursery.serve_until(lambda: worker in self.exits(), time.monotonic() + timeout_s):
            self._ask_where_they_hang()
            self.kill()
            raise AssertionError(f"worker {worker} did not end within {timeout_s:g} s\n{self.tails()}")

    @property
    def events_path(self) -> Path:
        return self.run_dir / FILE_NAME

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_bytes().split(b"\n")[:-1]
        return [event for event in map(json.loads, lines) if name in (None, event["event"])]

    @cached_property
    def summary(self) -> RunSummary:
        """What the report says of it; only asked for once it is over."""
        return summarize_log(read_events(self.events_path))

    def output(self) -> str:
        return _read(self._output_path)

    def log(self, worker: int) -> str:
        return _read(self.run_dir / "logs" / f"worker_{worker}.log")

    def exits(self) -> dict[int, int]:
        """Exit codes of the workers that have ended, negative for a signal."""
        lines = [line.split() for line in _read(self.run_dir / "exits").splitlines()]
        return {int(worker): int(code) for worker, code in lines}

    def worker_pids(self) -> dict[int, int]:
        lines = [line.split() for line in _read(self.run_dir / "pids").splitlines()]
        return {int(worker): int(pid) for worker, pid in lines}

    def wish(self, what: str) -> None:
        """For jobs of wishing_gpt.py."""
        (self.run_dir / "wishes").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "wishes" / what).touch()

    def await_wish(self, what: str, timeout_s: float = JOB_S) -> None:
        """Wait until the script has made this file among the wishes."""
        made = (self.run_dir / "wishes" / what).exists
        assert self.nursery.serve_until(made, time.monotonic() + timeout_s), f"no {what}\n{self.tails()}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once; workers die with their launcher, stopped ones too."""
        if self.code is None and self.pid is not None:
            with suppress(ProcessLookupError):  # it has ended, and only the nursery knows yet
                os.kill(self.pid, signal.SIGKILL)
            self.nursery.serve_until(lambda: self.code is not None, time.monotonic() + 10.0)

    def tails(self) -> str:
        """The ends of everything that the job has written."""
        parts = {"launcher": self.output(), **{f"worker {w}": self.log(w) for w in range(self.workers)}}
        return "\n".join(
            f"---- {name} of {self.run_dir}\n" + "\n".join(text.splitlines()[-TAIL_LINES:])
            for name, text in parts.items()
        )

    @property
    def _output_path(self) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.out")

    def _ask_where_they_hang(self) -> None:
        """Let every worker write the stacks of its threads to its log."""
        for pid in self.worker_pids().values():
            if is_alive(pid):
                os.kill(pid, DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline:
            running = [worker for worker, pid in self.worker_pids().items() if is_alive(pid)]
            if all("Current thread" in self.log(worker) for worker in running):
                break
            time.sleep(0.05)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Nursery:
    """The warmed-up process, seen from the test runner.

    Args:
        script: what its jobs run unless they say otherwise. What is beside it is found before what is installed.
    """

    def __init__(self, script: Path = PRETRAIN) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of(script),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._answers = self._process.stdout.fileno()
        self._unread = b""
        self._ready = False
        self._jobs: dict[str, Job] = {}
        assert self.serve_until(lambda: self._ready, time.monotonic() + WARM_UP_S), "the nursery does not get ready"

    def start(
        self, run_dir: Path, arguments: Sequence[str], *, workers: int, script: Path | None = None, **options: Any
    ) -> Job:
        """Launch a job; `options` are those of LaunchOptions, `network`: the namespace that it runs in, `environment`:
        variables besides, `judge`: it "hangs", "fails" or "suspects", and `without_plugin`: as torchrun would."""
        job = Job(self, run_dir, workers, time.monotonic(), judge_fails=options.get("judge") == "fails")
        self._jobs[str(run_dir)] = job
        command = [str(script or self._script), *arguments]
        if "coordinator" in options:
            # Some of these nodes share no run directory.
            options["environment"] = {SECRET: NODES_SECRET, **options.get("environment", {})}
        request = {"run_dir": str(run_dir), "command": command, "workers_per_node": workers, **options}
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()
        assert self.serve_until(lambda: job.pid is not None, time.monotonic() + 10.0), "the nursery does not answer"
        return job

    def serve_until(self, test: Callable[[], Any], deadline: float) -> bool:
        """Take in what the nursery says until `test` holds; False if it does not before the deadline."""
        while not test():
            if time.monotonic() > deadline:
                return False
            if select.select([self._answers], [], [], 0.02)[0]:
                data = os.read(self._answers, 65536)
                assert data, f"the nursery has ended with {self._process.poll()}"
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
        return True

    def close(self) -> None:
        for job in self._jobs.values():
            job.kill()
        self._requests.close()
        try:
            self._process.wait(10.0)
        finally:
            self._process.kill()

    def _hear(self, answer: dict[str, Any]) -> None:
        if "run_dir" not in answer:
            self._ready = True
            return
        job = self._jobs[answer["run_dir"]]
        job.pid = answer["pid"]
        if "code" in answer:
            job.code, job.cpu_s, job.seconds = answer["code"], answer["cpu_s"], time.monotonic() - job.started_at


JOB_ENVIRONMENT = {
    "RESIHP_CPU": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(":"),
}


def environment_of(script: Path) -> dict[str, str]:
    """What jobs of a script are run with: CPUs stand in, and imports are from its own directory first, as Python's."""
    path = f"{script.parent}{os.pathsep}{JOB_ENVIRONMENT['PYTHONPATH']}"
    return {**os.environ, **JOB_ENVIRONMENT, "PYTHONPATH": path}


@dataclass
class Jobs:
    """Starts jobs in the session's directory and remembers runs that several tests compare with."""

    nursery: Nursery
    directory: Path
    _references: dict[tuple[Any, ...], Job] = field(default_factory=dict)
    _count: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))

    def start(self, arguments: Sequence[str], *, workers: int, wishes: Sequence[str] = (), **options: Any) -> Job:
        run_dir = self.directory / f"run{next(self._count)}"
        (run_dir / "wishes").mkdir(parents=True)
        for wish in wishes:
            (run_dir / "wishes" / wish).touch()
        return self.nursery.start(run_dir, arguments, workers=workers, **options)

    def run(self, arguments: Sequence[str], *, workers: int, **options: Any) -> Job:
        return self.start(arguments, workers=workers, **options).wait()

    def reference(self, arguments: Sequence[str], *, workers: int) -> Job:
        """The same job, uninterrupted; run once a session."""
        key = (*arguments, workers)
        if key not in self._references:
            job = self.run(arguments, workers=workers)
            assert job.code == 0, job.tails()
            assert not job.summary.deaths and not job.summary.recoveries
            self._references[key] = job
        return self._references[key]


def flags(**values: Any) -> list[str]:
    """tensor_parallel=2, swiglu=True as --tensor-parallel 2 --swiglu; None and False leave a flag out."""
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return words


TINY: Mapping[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 6, "lr": "1e-3", "min_lr": "1e-4",
    "lr_decay_style": "cosine", "lr_warmup_iters": 2, "tokenizer_type": "NullTokenizer", "vocab_size": 64,
    "mock_data": True, "split": "98,1,1", "num_workers": 0, "log_interval": 1, "eval_interval": 100, "eval_iters": 0,
    "transformer_impl": "local", "position_embedding_type": "rope", "no_rope_fusion": True,
    "attention_backend": "unfused", "no_gradient_accumulation_fusion": True, "no_persist_layer_norm": True,
    "attention_dropout": 0, "hidden_dropout": 0, "no_masked_softmax_fusion": True, "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True, "distributed_backend": "gloo", "resihp": True, "resihp_record_samples": True,
    "resihp_record_digests": True,
}  # fmt: skip
"""A model and a job that are as small as they can be."""


DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.5, "disable_bias_linear": True,
}  # fmt: skip
"""Its layers are mixtures of experts. The losses that balance them are so large that a wrong share of one is seen."""
LINEAR: dict[str, Any] = EXPERTS | {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "sequence_parallel": True, "swiglu": True,
}  # fmt: skip
"""Each second layer has a gated delta net."""
BIASED: dict[str, Any] = EXPERTS | {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.002,
}  # fmt: skip
"""Biases lead tokens to other experts. Experts' scores differ by about ten times of what a step changes."""


def ask_at(path: Path, *plans: tuple[ParallelPlan, int]) -> list[str]:
    """What --resihp-plan takes: plans, and the iterations at which they are asked for. `path`: for their files."""
    words = []
    for number, (plan, iteration) in enumerate(plans):
        file = path / f"plan{number}.json"
        file.write_text(json.dumps(plan.to_dict()))
        words.append(f"{file}@{iteration}")
    return words


def ask_for(path: Path, *plans: ParallelPlan, every: int = 2) -> list[str]:
    """The same for one plan after the other, every so many iterations from the second on."""
    return ask_at(path, *((plan, 2 + every * number) for number, plan in enumerate(plans)))


def tiny(**changes: Any) -> list[str]:
    """The command line of a tiny job with some flags changed."""
    return flags(**TINY | changes)


# ---- what the tests check


class Tolerance(NamedTuple):
    """How far sums in another order may lead from the reference, relative: of losses, and of norms of gradients."""

    loss: float
    norm: float


FP32: Final = Tolerance(1e-5, 1e-5)
"""About a hundred times of what is seen: 4e-8 and 1e-7."""
BF16: Final = Tolerance(2e-4, 1e-2)
"""Seen are 2e-5 and 2e-3."""


def check_training(job: Job, reference: Job, tolerance: Tolerance = FP32) -> None:
    """It ended well and has trained what the reference has: every iteration, every sample, once and in its place."""
    assert job.code == 0, job.tails()
    summary, expected = job.summary, reference.summary
    assert summary.completed
    assert sorted(summary.loss) == sorted(expected.loss) == list(range(1, summary.job.train_iters + 1)), job.tails()
    difference = compare(summary.loss, expected.loss)
    assert difference is not None and difference <= tolerance.loss, difference_table(summary, expected)
    assert (summary.samples_lost, summary.samples_applied_twice, summary.samples_out_of_place) == (0, 0, 0)
    assert summary.samples_consumed == summary.job.train_iters * summary.job.global_batch_size
    norms = compare(summary.grad_norm, expected.grad_norm)
    assert norms is not None and norms <= tolerance.norm, difference_table(summary, expected)
    assert not summary.ignored_events, summary.ignored_events
    guesses = [line for worker in range(job.workers) for line in job.log(worker).splitlines() if "groups ahead" in line]
    assert not guesses, guesses
    check_digests(job)


def check_digests(job: Job) -> None:
    """All holders of a shard ended with the same bits, and every shard has one."""
    last = max(event["iteration"] for event in job.events("digest"))
    reports = [event for event in job.events("digest") if event["iteration"] == last]
    epoch = max(event["epoch"] for event in reports)
    [plan] = [ParallelPlan.from_dict(e["plan"]) for e in job.events("epoch_started") if e["epoch"] == epoch]
    native = plan.not_uniform is None and plan.expert_parallel == 1
    found: dict[str, dict[int, str]] = {}
    for event in reports:
        for key, digest in event["digests"].items():
            # What was reported before the epoch broke has other keys: those of slices have an odd count of numbers,
            # those of shards and of a distributed optimizer's parts an even one.
            if native == (key.count("/") % 2 == 1):
                found.setdefault(key, {})[event["worker"]] = digest
    if native:
        shards = {key for key in found if key.count("/") == 1}
        assert shards == {f"{stage}/{rank}" for stage, rank in plan.grid.coordinates()}
    else:
        layers = {int(key.split("/")[0]) for key in found} - {TIED}
        chunks = plan.replicas[0].chunks
        assert layers == set(range(chunks[-1].end if chunks else max(layers) + 1))
    for shard, digests in found.items():
        assert len(set(digests.values())) == 1, f"holders of {shard} differ: {digests}"


def check_samples(job: Job) -> None:
    """Each sample was trained on once and in its place, and holders agree."""
    summary = job.summary
    assert (summary.samples_lost, summary.samples_applied_twice, summary.samples_out_of_place) == (0, 0, 0)
    assert summary.samples_consumed == summary.job.train_iters * summary.job.global_batch_size
    check_digests(job)


def difference_table(summary: RunSummary, expected: RunSummary) -> str:
    lines = ["iteration  loss  reference  |  gradient norm  reference"]
    for iteration in sorted(summary.loss.keys() | expected.loss.keys()):
        values = (summary.loss, expected.loss, summary.grad_norm, expected.grad_norm)
        lines.append(f"{iteration}  " + "  ".join(repr(value.get(iteration)) for value in values))
    return "\n".join(lines)
