# SPDX-License-Identifier: Apache-2.0
"""Whether what crosses goes between devices: what workers have seen fail, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.executor.carriers import DirectCarrier
from megatron_resihp.executor.direct.peers import Parts, Pending
from megatron_resihp.executor.groups.errors import is_communicator_error
from megatron_resihp.integration.modes import heterogeneous
from megatron_resihp.integration.modes.direct_way import DirectTrials, DirectWayFailed, WatchedPeers, agreed_to_use
from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode


class Broken:
    """Peers of which each call fails, or only the wait for what was begun."""

    def __init__(self, error: Exception, begins: bool = False) -> None:
        self._error, self._begins = error, begins

    def connect(self) -> None:
        raise self._error

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise self._error

    def exchange(self, sends: Parts, receives: Parts) -> Pending:
        if self._begins:
            return self
        raise self._error

    def wait(self) -> None:
        raise self._error


def test_an_error_among_the_living_is_the_ways_for_good() -> None:
    trials = DirectTrials()
    assert trials.is_usable({0, 1, 2})
    trials.strike({0, 1, 2})
    assert not trials.is_usable({0, 1, 2, 3})
    assert not trials.is_usable({0, 1})


def test_an_error_with_a_dead_worker_is_that_workers() -> None:
    trials = DirectTrials()
    trials.strike({0, 1, 2})
    assert trials.is_usable({0, 1})
    assert trials.is_usable({0, 1, 2}), "another worker with the same peers has nothing to do with it"


@pytest.mark.parametrize("begins", [False, True], ids=["posting", "waiting"])
def test_errors_are_noted_and_lead_to_another_epoch(begins: bool) -> None:
    noted: list[str] = []
    error = torch.OutOfMemoryError("CUDA out of memory")
    peers = WatchedPeers(Broken(error, begins), lambda: noted.append("failed"))
    with pytest.raises(DirectWayFailed) as failed:
        peers.exchange((), ()).wait()
    assert noted == ["failed"] and failed.value.__cause__ is error
    assert is_communicator_error(failed.value), "the host's way may have what the device lacks"


def watched_mode(peers: Any, noted: list[str]) -> Any:
    mode: Any = object.__new__(HeterogeneousMode)
    mode.view = SimpleNamespace(worker=0, works=False, shares=SimpleNamespace(contributed=set()))
    mode.averaging = SimpleNamespace(per_token=False)
    mode._direct, mode._sums = WatchedPeers(peers, lambda: noted.append("failed")), ()
    mode._runtime = SimpleNamespace(reach=lambda place: None, held=SimpleNamespace(live=SimpleNamespace(model=[])))
    return mode


TAKING: dict[str, Callable[[Any], object]] = {
    "a message": lambda mode: DirectCarrier(mode._direct, None).room((2, 3), torch.float32),
    "a sum": lambda mode: mode.share_gradients(),
}


@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
@pytest.mark.parametrize("full", [True, False], ids=["too little memory", "another error"])
def test_too_little_memory_for_what_crosses_leads_to_the_hosts_way(
    monkeypatch: pytest.MonkeyPatch, take: Callable[[Any], object], full: bool
) -> None:
    """There it takes less of the device. An error of the program's stays what it is."""
    error = torch.OutOfMemoryError("CUDA out of memory") if full else ValueError("a shape")
    noted: list[str] = []

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(heterogeneous, "summed_views", lambda *_: {})
    monkeypatch.setattr(heterogeneous, "sum_between_devices", fail)
    with pytest.raises(DirectWayFailed if full else ValueError) as failed:
        take(watched_mode(Broken(error), noted))
    assert is_communicator_error(failed.value) is full
    assert noted == ["failed"] * full


def test_one_worker_that_is_against_it_is_enough() -> None:
    class Everybody:
        others_against = 0.0

        def sum(self, values: torch.Tensor) -> None:
            values += self.others_against

    everybody = Everybody()
    assert agreed_to_use(True, everybody)  # type: ignore[arg-type]
    assert not agreed_to_use(False, everybody)  # type: ignore[arg-type]
    everybody.others_against = 1.0
    assert not agreed_to_use(True, everybody)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_used", "broken", "usable"),
    [(True, False, False), (True, True, True), (False, False, True)],
    ids=["in use", "in a broken epoch", "through the host"],
)
def test_an_error_that_nccl_finds_in_the_background(is_used: bool, broken: bool, usable: bool) -> None:
    """No call has failed; the way may be why, unless it is not used, or the abort of a broken epoch is."""
    mode: Any = object.__new__(HeterogeneousMode)
    trials, members = DirectTrials(), (0, 1, 2)
    mode.view = SimpleNamespace(plan=SimpleNamespace(members=members))
    mode._direct = object() if is_used else None
    heard = SimpleNamespace(broken=lambda: broken)
    mode._runtime = SimpleNamespace(
        control=SimpleNamespace(heard=heard), recovery=SimpleNamespace(direct_way=trials)
    )  # fmt: skip
    mode.nccl_failed()
    assert trials.is_usable(members) is usable


@pytest.mark.parametrize("is_used", [True, False])
def test_all_meet_before_an_iteration_whose_waits_are_bounded(is_used: bool) -> None:
    """Nobody's operation between devices waits for an evaluation of others."""
    mode: Any = object.__new__(HeterogeneousMode)
    met: list[torch.Tensor] = []
    mode._direct, mode.everybody = object() if is_used else None, SimpleNamespace(sum=met.append)
    mode.begin_iteration()
    assert len(met) == int(is_used)
