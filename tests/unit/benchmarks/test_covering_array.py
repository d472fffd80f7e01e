# SPDX-License-Identifier: Apache-2.0
"""The rows of `benchmarks/covering.py` have each pair of values that goes together, and none that doesn't."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from recipe_runs.covering.factors import FACTORS, FORBIDDEN
from recipe_runs.covering.pairs import Forbidden, Space, covering_array, pairs_of

SMALL = {"a": ["0", "1", "2"], "b": ["0", "1"], "c": ["0", "1", "2"], "d": ["0", "1"], "e": ["0", "1", "2", "3"]}
IN_CHAINS = (
    # No row has a 1 with b 1, though no constraint says so: c would have no value.
    Forbidden({"a": ["1"], "b": ["1"], "c": ["0", "1"]}, "first"),
    Forbidden({"a": ["1"], "c": ["2"]}, "second"),
    Forbidden({"d": ["1"], "e": ["3"]}, "third"),
)


@pytest.mark.parametrize("forbidden", [(), IN_CHAINS], ids=["all go together", "some don't"])
@pytest.mark.parametrize("seed", range(5))
def test_each_pair_that_goes_together_is_in_a_row(forbidden: tuple[Forbidden, ...], seed: int) -> None:
    space = Space(SMALL, forbidden)
    complete = [dict(zip(SMALL, values, strict=True)) for values in product(*SMALL.values())]
    possible = {pair for row in complete if space.is_allowed(row) for pair in pairs_of(row, SMALL)}
    array = covering_array(SMALL, forbidden, seed)
    assert all(space.is_allowed(row) for row in array.rows)
    assert {pair for row in array.rows for pair in pairs_of(row, SMALL)} == possible
    assert array.covered == len(possible)
    assert set(array.infeasible) == set(space.pairs()) - possible
    assert len(array.rows) <= 20, "12 is the least"
    assert array == covering_array(SMALL, forbidden, seed), "the same seed gives the same rows"


def test_what_does_not_go_together_is_named() -> None:
    infeasible = covering_array(SMALL, IN_CHAINS, 0).infeasible
    assert (("a", "1"), ("c", "2")) in infeasible and (("a", "1"), ("b", "1")) in infeasible
    assert len(infeasible) == 3


def test_constraints_are_about_values_that_exist() -> None:
    """A typing error in one would let rows through that Megatron refuses."""
    for forbidden in FORBIDDEN:
        assert forbidden.why
        for factor, values in forbidden.values.items():
            assert set(values) <= FACTORS[factor].keys()


@pytest.mark.nightly
def test_megatron_and_the_plugin_accept_all_rows(repository: Path) -> None:
    """In a process of its own, as the stand-in for GPUs has to be in place."""
    command = [sys.executable, repository / "benchmarks" / "covering.py"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stderr.splitlines()[-1])
    rows = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(rows) == answer["rows"] == len({row["name"] for row in rows})
    assert all(answer["infeasible"].values()), "each pair that is left out has a reason"
    tried = {word for row in rows for word in row["args"]}
    refused = {flag for flags in answer["refused_values"].values() for flag in flags}
    assert "muon" in tried or "optimizer: muon" in answer["refused_values"]
    assert {"--multi-latent-attention", "--moe-grouped-gemm", "--mtp-num-layers"} <= tried | refused
