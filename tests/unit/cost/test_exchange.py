# SPDX-License-Identifier: Apache-2.0
"""What replicas that share experts or sequences compute, keep and send each other, beside arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_resihp.cost.device import Device, layer_work
from megatron_resihp.cost.exchange import exchange_seconds
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.memory import layer_bytes
from megatron_resihp.cost.model.layers import model_from_arguments
from megatron_resihp.cost.model.presets import PRESETS
from megatron_resihp.cost.training import Recompute, Training
from megatron_resihp.plan.rules import Sharing

TOKENS, HIDDEN = 4096, 4096
EXPERTS = model_from_arguments({**PRESETS["mixtral-8x7b"], "num_layers": 2})
LONG = model_from_arguments({**PRESETS["llama3-405b"], "num_layers": 2})
DEVICE = Device(312e12, 0.5, latency=1e-5, bandwidth=25e9, node_bandwidth=300e9)
TRAINING = Training(TOKENS, sequence_parallel=True)
F, B, W = range(3)


def test_half_of_the_tokens_leave_the_node_where_half_of_the_experts_are() -> None:
    seconds = exchange_seconds(EXPERTS, replace(TRAINING, expert_parallel=8), DEVICE, 1, near=4)
    each = 1e-5 + TOKENS * 2 * HIDDEN * 2 * 4 / 8 / 25e9  # two copies of a token, in bf16
    assert seconds[:, 1] == pytest.approx([2 * each, 2 * each, 0])
    assert not seconds[:, [0, -1]].any(), "embedding and head have no experts"


def test_inside_a_node_its_own_links_count() -> None:
    training = replace(TRAINING, expert_parallel=4)
    within, across = (exchange_seconds(EXPERTS, training, DEVICE, 2, near)[F, 1] for near in (4, 1))
    # Each of two tensor-parallel members has half of the tokens.
    assert within == pytest.approx(2 * (1e-5 + TOKENS * HIDDEN * 2 * 3 / 4 / 300e9))
    assert across == pytest.approx(2 * (1e-5 + TOKENS * HIDDEN * 2 * 3 / 4 / 25e9))


def test_members_of_a_stage_with_other_experts_send_inside_their_node() -> None:
    groups = replace(TRAINING, expert_parallel=2, expert_groups=2)
    seconds = exchange_seconds(EXPERTS, groups, DEVICE, 2, near=1)[F, 1]
    # Four have the experts: two of them are here, two elsewhere.
    assert seconds == pytest.approx(2 * (1e-5 + TOKENS * HIDDEN * 2 * 2 / 4 / 25e9))
    alone = exchange_seconds(EXPERTS, replace(groups, expert_parallel=1), DEVICE, 2, near=1)[F, 1]
    assert alone == pytest.approx(2 * (1e-5 + TOKENS * HIDDEN * 2 / 2 / 300e9))


def test_tokens_may_be_spread_otherwise() -> None:
    training = replace(TRAINING, expert_parallel=4)
    spread = exchange_seconds(EXPERTS, training, DEVICE, 1, 1, spread=(0.0, 0.5))[F, 1]
    assert spread == pytest.approx(2 * (1e-5 + TOKENS * 2 * HIDDEN * 2 / 2 / 25e9))


def test_who_shares_nothing_sends_nothing() -> None:
    assert not exchange_seconds(EXPERTS, TRAINING, DEVICE, 1, 1).any()


def test_full_recomputation_sends_again() -> None:
    plain = replace(TRAINING, expert_parallel=2)
    seconds = exchange_seconds(EXPERTS, replace(plain, recompute=Recompute.FULL), DEVICE, 1, 1)
    assert seconds[B, 1] == pytest.approx(2 * exchange_seconds(EXPERTS, plain, DEVICE, 1, 1)[B, 1])


def test_a_ring_hides_behind_attention_and_a_gather_does_not() -> None:
    short = Training(8192, context_parallel=8)
    long = Training(131072, context_parallel=8)
    gathered = exchange_seconds(LONG, replace(long, gathers_context=True), DEVICE, 1, 1)
    once = 7 * (1e-5 + 131072 / 8 * 2 * 8 * 128 * 2 / 25e9)
    assert gathered[:, 1] == pytest.approx([once, 2 * once, 0])
    assert not exchange_seconds(LONG, long, DEVICE, 1, 1).any()
    slow = replace(DEVICE, bandwidth=1e9)
    assert 0 < exchange_seconds(LONG, short, slow, 1, 1)[F, 1] < once * 25


class TestLoads:
    LOADS = (5.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)

    @pytest.mark.parametrize(("degree", "share"), [(1, 1.0), (2, 1.0), (4, 6 / 4), (8, 5 / 2)])
    def test_the_busiest_workers_share(self, degree: int, share: float) -> None:
        training = replace(TRAINING, expert_parallel=degree, expert_loads=self.LOADS)
        assert training.busiest_share(8) == pytest.approx(share)

    def test_the_busiest_workers_share_where_it_has_more_experts_than_others(self) -> None:
        training = replace(TRAINING, expert_parallel=3)
        assert training.busiest_share(8) == pytest.approx(3 / (8 / 3))
        assert replace(training, expert_loads=self.LOADS).busiest_share(8) == pytest.approx(7 / (16 / 3))

    def test_members_with_other_experts_count_as_sharers(self) -> None:
        training = replace(TRAINING, expert_parallel=2, expert_groups=2, expert_loads=self.LOADS)
        assert training.busiest_share(8) == pytest.approx(6 / 4)

    def test_what_was_measured_goes_before(self) -> None:
        training = replace(TRAINING, expert_parallel=2, expert_loads=self.LOADS, busiest_shares=(1.0, 1.7))
        assert training.busiest_share(8) == 1.7
        assert replace(training, expert_parallel=4).busiest_share(8) == pytest.approx(6 / 4), "of so many it was not"

    def test_it_computes_sends_and_keeps_more(self) -> None:
        even = replace(TRAINING, expert_parallel=4)
        uneven = replace(even, expert_loads=self.LOADS)
        columns = 2 * 3 * HIDDEN * 14336 * 2  # FLOPs of two experts per token
        more = layer_work(EXPERTS, uneven, 1)[F, 1, 0] - layer_work(EXPERTS, even, 1)[F, 1, 0]
        assert more == pytest.approx(columns / 2)
        sent = [exchange_seconds(EXPERTS, each, DEVICE, 1, 1)[F, 1] - 2e-5 for each in (even, uneven)]
        assert sent[1] == pytest.approx(1.5 * sent[0])
        kept = [layer_bytes(EXPERTS, each, 1).kept[1] for each in (even, uneven)]
        assert kept[1] - kept[0] == pytest.approx(TOKENS * 2 * 3 * 14336 * 2 / 2)


class TestOfAJob:
    COST = JobCost(LONG, Training(131072), DEVICE, 8, sharings=(Sharing(8), Sharing(4), Sharing()))

    def test_those_that_share_a_sequence_each_have_a_part_of_it(self) -> None:
        shared = self.COST.shared(8, 1)
        assert np.allclose(8 * shared.seconds(2), self.COST.seconds(2))
        assert np.allclose(8 * shared.bytes(2).kept, self.COST.bytes(2).kept)
        assert (shared.bytes(2).state == self.COST.bytes(2).state).all()
        assert shared.transfer(1, 1) - 1e-5 == pytest.approx((self.COST.transfer(1, 1) - 1e-5) / 8)
        assert shared.shared(8, 1) is shared

    def test_what_was_measured_is_shared_out_as_work_is(self) -> None:
        measured = replace(self.COST, alone=np.ones((3, self.COST.layers)))
        assert np.allclose(measured.shared(4, 1).seconds(1)[F, 1:], 0.25)

    def test_more_experts_take_more_memory(self) -> None:
        cost = JobCost(EXPERTS, TRAINING, DEVICE, 8, sharings=(Sharing(1, 8), Sharing()))
        one, all_of_them = cost.shared(1, 8).bytes(1).state[1], cost.bytes(1).state[1]
        assert all_of_them - one == pytest.approx(18 * 3 * HIDDEN * 14336 * 7, rel=1e-9)
