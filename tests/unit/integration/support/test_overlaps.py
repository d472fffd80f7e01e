# SPDX-License-Identifier: Apache-2.0
"""No overlap that Megatron would have is given up without a word: modes and `resihp check` have a line for those
that are not there under every plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from megatron_resihp.integration.modes.overlaps import ALL_EXPERTS, UNLIKE_REPLICAS, WITH_ALL_EXPERTS
from megatron_resihp.integration.support import TABLE, Evidence
from megatron_resihp.integration.world.heterogeneous_groups import HeterogeneousView, Sizes
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

OVERLAPS: Final = {"defer_embedding_wgrad_compute"} | {
    name for name, row in TABLE.items() if row.supported and "overlap" in name and not (row.without or row.given_up)
}
"""Supported arguments that ask for an overlap, or for how it is done, but for those that are never followed."""
NOTHING_TO_HIDE: Final = {
    "overlap_p2p_comm": "receives are posted before they are due, and no send is waited for before an iteration's end",
    "overlap_p2p_comm_warmup_flush": "the same",
    "ep_overlap_early_attn_memory_release": "it is about how --overlap-moe-expert-parallel-comm is done",
    "moe_shared_expert_overlap": "Megatron's layers do it, whatever calls them",
}
"""Overlaps that have another form where replicas differ, or belong to one that has a line."""
WITHOUT_OVERLAP: Final = {**UNLIKE_REPLICAS, **ALL_EXPERTS}


def sizes(holder: Any) -> Sizes:
    derived: Any = SimpleNamespace(of_degree=lambda degree: {})
    return Sizes(64, derived, holder)


def unlike_replicas() -> HeterogeneousView:
    layers = (Chunk(0, 0, 6),)
    plan = ParallelPlan((Replica(((0,),), (0,), layers), Replica(((1, 2),), (1,), layers)), {})
    return HeterogeneousView(plan, 0, None)


def test_each_overlap_is_there_or_has_a_line() -> None:
    """A flag that the table comes to support has to be put into one of both."""
    assert WITHOUT_OVERLAP.keys() | NOTHING_TO_HIDE.keys() == OVERLAPS
    assert not WITHOUT_OVERLAP.keys() & NOTHING_TO_HIDE.keys()


def test_what_unlike_replicas_turn_off_is_known() -> None:
    holder = SimpleNamespace(**dict.fromkeys(OVERLAPS, True))
    sizes(holder).replace(unlike_replicas())
    off = {name for name in OVERLAPS if not getattr(holder, name)}
    assert UNLIKE_REPLICAS.keys() <= off <= WITHOUT_OVERLAP.keys() | NOTHING_TO_HIDE.keys()


def test_what_megatron_is_told_where_each_worker_has_all_experts() -> None:
    assert ALL_EXPERTS.keys() <= WITH_ALL_EXPERTS.keys() <= ALL_EXPERTS.keys() | NOTHING_TO_HIDE.keys()
    assert not any(WITH_ALL_EXPERTS.values())


def test_megatrons_own_groups_have_each_overlap_again() -> None:
    holder = SimpleNamespace(**dict.fromkeys(OVERLAPS, True))
    own = sizes(holder)
    own.replace(unlike_replicas())
    own.restore()
    assert vars(holder) == dict.fromkeys(OVERLAPS, True)


def test_what_overlaps_is_held_by_tests() -> None:
    """It changes when others are waited for, so that reading is no evidence."""
    assert {TABLE[name].evidence for name in OVERLAPS} == {Evidence.TEST}
