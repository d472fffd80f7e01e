# SPDX-License-Identifier: Apache-2.0
"""Seeds of random streams: unlike for unlike purposes, and the same in every version."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from megatron_resihp.integration.streams.seeds import EVERYBODY, WHOLE, Key, Part, draws, seed_of


def test_each_purpose_has_a_seed_of_its_own() -> None:
    parts = [WHOLE, *(Part(rank, size) for size in (2, 4) for rank in range(size))]
    keys = itertools.product((1, 11), (1, 2, 11), (0, 1, 11), (0, 1, 11), (EVERYBODY, "model-parallel-rng"), parts)
    seeds = [seed_of(Key(*key)) for key in keys]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * 3 * 3 * 2 * 7
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("kind", "part", "digest"),
    [(EVERYBODY, WHOLE, "13e1785622167f66"), ("model-parallel-rng", Part(1, 2), "1bec2443408f735b")],
)
def test_seeds_are_those_of_earlier_versions(kind: str, part: Part, digest: str) -> None:
    """So a job that goes on from a checkpoint has the masks that it would have had. The digests are those of another
    program: printf 1234/7/3/2/KIND/RANK/SIZE | b2sum -l 64"""
    assert seed_of(Key(1234, 7, 3, 2, kind, part)).to_bytes(8, "little").hex() == digest


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"hidden_dropout": 0.1}, True),
        ({"attention_dropout": 0.1}, True),
        ({"moe_input_jitter_eps": 0.01}, True),
        ({"moe_router_force_load_balancing": True}, True),
    ],
)
def test_whether_a_model_draws(changes: dict[str, float], expected: bool) -> None:
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None}
    args = SimpleNamespace(**none | {"moe_router_force_load_balancing": False} | changes)
    assert draws(args) is expected
