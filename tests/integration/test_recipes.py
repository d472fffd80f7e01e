# SPDX-License-Identifier: Apache-2.0
"""Launch configurations as people have them, made small, train the same through a death as stock Megatron without one.

`benchmarks/recipes.py` does that for all of a file; here are some that were written for this, one of them daily.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from jobs import REPOSITORY, Jobs

sys.path.append(str(REPOSITORY / "benchmarks"))

from acceptance import read_recipes
from recipe_runs.runs import Runner
from recipe_runs.shrinking.shrink import shrink
from recipe_runs.trial import EQUAL, Trial

RECIPES = {r["name"]: r["args"] for r in read_recipes(Path(__file__).with_name("typical_recipes.json").read_text())}
DAILY = "dense in two stages"
SEED = 0


@pytest.mark.parametrize("name", [DAILY, *(pytest.param(n, marks=pytest.mark.nightly) for n in RECIPES if n != DAILY)])
def test_recipe_trains_the_same_through_a_death(jobs: Jobs, tmp_path: Path, name: str) -> None:
    """A worker is killed, the others change to unlike replicas, and it returns; with `--lr 0` the loss is another."""
    words = RECIPES[name]
    shrunk = shrink(words, {word: word for word in words if word.startswith("--")})
    verdict = Trial(Runner(jobs.nursery, tmp_path), shrunk, Random(f"{SEED}/{name}")).verdict()
    assert verdict.outcome == EQUAL, verdict
