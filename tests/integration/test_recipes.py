# SPDX-License-Identifier: Apache-2.0
"""Launch configurations as people have them, made small, train the same through a death as stock Megatron without one.

`benchmarks/recipes.py` does that for all of a file; here are some that were written for this, one of them daily, and
some rows of `benchmarks/covering.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jobs import REPOSITORY, Jobs

sys.path.append(str(REPOSITORY / "benchmarks"))

from acceptance import read_recipes
from recipe_runs.runs import Runner
from recipe_runs.shrinking.shrink import shrink
from recipe_runs.trial import EQUAL, Trial

RECIPES = {r["name"]: r["args"] for r in read_recipes(Path(__file__).with_name("typical_recipes.json").read_text())}
DAILY = "dense in two stages"
"""Only GPUs have the kernels that it asks for. A second one daily would take longer than the daily tests may."""
SEED = 0
ROWS = 2
"""Of the covering array, drawn by the seed."""


@pytest.mark.parametrize("name", [DAILY, *(pytest.param(n, marks=pytest.mark.nightly) for n in RECIPES if n != DAILY)])
def test_recipe_trains_the_same_through_a_death(jobs: Jobs, tmp_path: Path, name: str) -> None:
    """A worker is killed, the others change to unlike replicas, and it returns; with `--lr 0` the loss is another."""
    check(jobs, tmp_path, name, RECIPES[name])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Of the covering array."""
    command = [sys.executable, REPOSITORY / "benchmarks" / "covering.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(ROWS))
def test_flags_that_few_recipes_have_train_the_same_beside_each_other(
    jobs: Jobs, tmp_path: Path, rows: list[dict[str, Any]], number: int
) -> None:
    row = Random(SEED).sample(rows, ROWS)[number]
    check(jobs, tmp_path, row["name"], row["args"])


def check(jobs: Jobs, directory: Path, name: str, words: Sequence[str]) -> None:
    shrunk = shrink(words, {word: word for word in words if word.startswith("--")})
    assert name != DAILY or shrunk.kernels
    verdict = Trial(Runner(jobs.nursery, directory), shrunk, Random(f"{SEED}/{name}")).verdict()
    assert verdict.outcome == EQUAL, (name, verdict)
    assert not [path for path in outputs() if path.startswith(str(directory))], "processes are left of a run"


def outputs() -> Iterator[str]:
    """Where the processes of this machine write to."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # it has just ended
            yield str(output.readlink())
