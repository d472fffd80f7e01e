# SPDX-License-Identifier: Apache-2.0
"""Whether a worker was started as the job was: what is compared, what may differ, and what is said."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.training import arguments

from megatron_resihp.config import add_arguments
from megatron_resihp.control.worker.identity import Identity, UnlikeError, check_in
from megatron_resihp.integration import releases
from megatron_resihp.integration.patches.arguments import identity
from megatron_resihp.integration.support import LACKING, workers

COMMON = "--num-layers 2 --seq-length 64 --micro-batch-size 2 --lr 1e-3 --tokenizer-type NullTokenizer --resihp".split()


class Keys(dict[str, str]):
    """A store, as far as it is needed."""

    def set_once(self, key: str, value: str) -> str:
        return self.setdefault(key, value)

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(self.get(key, 0.0)) + amount)
        return int(self[key])

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str, timeout_s: float) -> Any:
        return super().get(key, timeout_s)


Started = Callable[..., Identity]


@pytest.fixture(scope="module")
def started() -> Started:
    """Identity of a worker started with these arguments beside the common ones."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = parser._actions[:]
    add_arguments(parser)
    parser.add_argument("--users-own")

    def start(*words: Any, **set_later: Any) -> Identity:
        return identity.identity_of(vars(parser.parse_args([*COMMON, *map(str, words)])) | set_later, actions)

    return start


def refusal(job: Identity, other: Identity, joining: bool = True) -> str:
    """What a worker is told that comes to a job; "" where it may."""
    store = Keys()
    check_in(store, job, False)  # type: ignore[arg-type]
    try:
        check_in(store, other, joining)  # type: ignore[arg-type]
    except UnlikeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--seq-length 128", "--seq-length 128 (the job's: 64)"),
        ("--micro-batch-size 1", "--micro-batch-size 1 (the job's: 2)"),
        ("--lr 3e-3", "--lr 0.003 (the job's: 0.001)"),
        ("--adam-beta2 0.95", "--adam-beta2 0.95 (the job's: 0.999)"),
        ("--swiglu", "--swiglu given (the job's: not given)"),
        ("--disable-bias-linear", "--disable-bias-linear given (the job's: not given)"),
        ("--seed 7", "--seed 7 (the job's: 1234)"),
        ("--split 90,10,0", "--split 90,10,0 (the job's: none)"),
        ("--attention-backend unfused", "--attention-backend unfused (the job's: auto)"),
        ("--users-own x", "--users-own x (the job's: none)"),
        ("--save here", "--save given (the job's: not given)"),
        ("--resihp-record-samples", "--resihp-record-samples true (the job's: false)"),
    ],
)
def test_what_changes_what_is_computed_is_refused_by_name(started: Started, given: str, said: str) -> None:
    line = refusal(started(), started(*given.split()))
    assert line.startswith(f"this worker differs from the job: {said};") and "\n" not in line


def test_all_differences_are_told_but_for_very_many(started: Started) -> None:
    line = refusal(started(), started("--seq-length", 128, "--lr", 3e-3))
    assert "--lr 0.003 (the job's: 0.001), --seq-length 128 (the job's: 64);" in line
    many = [word for name in ("seed", "hidden-size", "adam-eps", "clip-grad", "min-lr", "rotary-base", "train-iters",
            "num-attention-heads", "kv-channels", "ffn-hidden-size") for word in (f"--{name}", 3)]  # fmt: skip
    assert "and 2 more; start it with" in refusal(started(), started(*many))


@pytest.mark.parametrize(
    "given",
    ["--num-workers 0", "--log-throughput", "--load elsewhere", "--data-cache-path /tmp/x", "--log-interval 7",
     "--lr 0.0010", "--resihp-strategy joint", "--resihp-inject kill:1@3", "--tensorboard-dir x", "--finetune"],
)  # fmt: skip
def test_what_may_differ(started: Started, given: str) -> None:
    assert refusal(started(), started(*given.split())) == ""


def test_where_checkpoints_go_may_differ_and_whether_not(started: Started) -> None:
    assert refusal(started("--save", "/a"), started("--save", "/b")) == ""


def test_those_that_begin_the_job_load_alike(started: Started) -> None:
    assert "--load given (the job's: not given)" in refusal(started(), started("--load", "x"), joining=False)
    assert refusal(started("--load", "/a"), started("--load", "/b"), joining=False) == ""


def test_all_log_in_the_same_iterations(started: Started) -> None:
    """They meet there."""
    store: Any = Keys()
    assert check_in(store, started("--log-interval", 5), False)["log_interval"] == 5
    assert check_in(store, started("--log-interval", 2), True)["log_interval"] == 5


@pytest.mark.parametrize("package", ["megatron-core", "torch", "megatron-resihp", "device"])
def test_versions(started: Started, package: str) -> None:
    job = started()
    older = Identity({**job.always, package: "0.1-old"}, job.at_start, job.in_step)
    assert f"{package} 0.1-old (the job's: {job.always[package]})" in refusal(job, older)


def test_of_workers_that_are_alike_one_writes_what_it_is(started: Started) -> None:
    store: Any = Keys()
    for _ in range(3):
        check_in(store, started(), False)
    assert len([value for value in store.values() if len(value) > 1000]) == 1


def test_the_text_of_a_value_is_the_same_in_all_processes() -> None:
    assert identity.plain([object(), {"x": (1, None)}]) == ["object", {"x": [1, None]}]


class TestData:
    """Wherever it is, it has to be the same."""

    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        for name in ("a", "b"):
            (tmp_path / f"{name}.idx").write_bytes(name.encode() * 3_000_000)
            (tmp_path / f"{name}.bin").write_bytes(b"x" * 5_000)
        return tmp_path

    def test_a_copy_elsewhere(self, data: Path, started: Started) -> None:
        for suffix in ("idx", "bin"):
            shutil.copy(data / f"a.{suffix}", data / f"copy.{suffix}")
        assert refusal(started("--data-path", data / "a"), started("--data-path", data / "copy")) == ""

    @pytest.mark.parametrize("where", [0, 2_999_999])
    def test_another_index_of_the_same_size(self, data: Path, started: Started, where: int) -> None:
        job = started("--data-path", data / "a")
        with (data / "a.idx").open("r+b") as file:
            file.seek(where)
            file.write(b"!")
        line = refusal(job, started("--data-path", data / "a"))
        assert "--data-path index 3000000 bytes" in line

    def test_more_data(self, data: Path, started: Started) -> None:
        job = started("--data-path", data / "a")
        with (data / "a.bin").open("ab") as file:
            file.write(b"x")
        assert "data 5001 bytes" in refusal(job, started("--data-path", data / "a"))

    def test_another_blend(self, data: Path, started: Started) -> None:
        job = started("--data-path", "0.3", data / "a", "0.7", data / "b")
        assert refusal(job, started("--data-path", "0.30", data / "a", "0.7", data / "b")) == ""
        assert "--data-path" in refusal(job, started("--data-path", "0.7", data / "a", "0.3", data / "b"))
        assert "--data-path" in refusal(job, started("--data-path", "0.3", data / "b", "0.7", data / "a"))
        line = refusal(job, started("--data-path", "0.3", data / "a", "0.6", data / "b"))
        assert "--data-path 0.6 (the job's: 0.7);" in line, "only what differs of it"

    def test_a_blend_in_a_file(self, data: Path, started: Started) -> None:
        (data / "one").write_text(f"1.0 {data / 'a'}")
        (data / "splits.json").write_text(json.dumps({"train": [str(data / "a")]}))
        flags = {"--data-args-path": data / "one", "--per-split-data-args-path": data / "splits.json"}
        jobs = [started(*flag) for flag in flags.items()]
        (data / "one").write_text(f"1.0 {data / 'b'}")
        (data / "splits.json").write_text(json.dumps({"train": [str(data / "b")]}))
        for job, flag in zip(jobs, flags.items(), strict=True):
            assert flag[0] in refusal(job, started(*flag))

    def test_a_vocabulary(self, data: Path, started: Started) -> None:
        for name, text in (("v1", "a b"), ("v2", "a b"), ("v3", "a c")):
            (data / name).write_text(text)
        job = started("--vocab-file", data / "v1")
        assert refusal(job, started("--vocab-file", data / "v2")) == ""
        assert "--vocab-file" in refusal(job, started("--vocab-file", data / "v3"))

    def test_reading_is_bounded(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (data / "huge").open("wb") as file:
            file.truncate(1 << 40)
        assert identity.content(data / "huge").startswith(f"{1 << 40} bytes")

    def test_what_is_missing_is_not_this_ones_business(self, data: Path, started: Started) -> None:
        assert refusal(started(), started("--data-path", data / "none")).startswith("this worker differs from the job")


def test_every_name_in_the_lists_is_an_argument_of_megatron(started: Started) -> None:
    known = set(vars(arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args([])))
    named = workers.MAY_DIFFER | workers.IN_STEP | workers.AT_START | workers.DATA | workers.BY_CONTENT
    assert named - known <= LACKING[releases.current().name], "a typo, or Megatron has dropped it"
