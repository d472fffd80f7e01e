# SPDX-License-Identifier: Apache-2.0
"""Slowed workers and links: how they are written, what is refused, and what the coordinator makes of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.config import ConfigError, Injection, ResihpConfig, Slowdown
from megatron_resihp.control.slowness import Slowness, SlownessDesk
from megatron_resihp.integration.probes.fault_injection import ScheduledSlowdowns
from megatron_resihp.protocol.notices import NOTICES, SlownessChanged

FACTORS = st.floats(0.01, 1.0)


class TestGrammar:
    @given(worker=st.integers(0, 4096), speed=FACTORS, iteration=st.integers(1, 10**6))
    def test_a_worker(self, worker: int, speed: float, iteration: int) -> None:
        assert Slowdown.parse(f"slow:{worker}:{speed}@{iteration}") == Slowdown((worker,), speed, iteration)

    def test_a_link_and_the_end_of_all(self) -> None:
        assert Slowdown.parse("link:3-1:0.3@20") == Slowdown((3, 1), 0.3, 20)
        assert Slowdown.parse("clear@30") == Slowdown((), 1.0, 30)

    @pytest.mark.parametrize("text", ["slow:1:1.5@3", "slow:1:0@3", "slow:1:nan@3", "slow:1:half@3", "link:2-2:0.5@3"])
    def test_what_cannot_be_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(ConfigError, match=f"--resihp-inject '{text}': ") as error:
            Slowdown.parse(text)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("text", ["slow:1@3", "slow:1:0.5", "link:1:0.5@3", "clear", "slow:1:0.5@0"])
    def test_another_form_is_answered_with_the_forms(self, text: str) -> None:
        with pytest.raises(ConfigError, match="nor slow:WORKER:SPEED@ITERATION, link:"):
            ResihpConfig(resihp_inject=[text]).injections()

    def test_failures_and_slowdowns_side_by_side_and_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "fault injections.json"
        path.write_text(json.dumps(["slow:3:0.6@10", "kill:1@15", "clear@20"]))
        config = ResihpConfig(resihp_inject=["stop:0@2:norm", f"@{path}"])
        assert config.injections() == (Injection("stop", 0, 2, "norm"), Injection("kill", 1, 15))
        assert config.slowdowns() == (Slowdown((3,), 0.6, 10), Slowdown((), 1.0, 20))

    @pytest.mark.parametrize("text", ["{", '{"slow": 3}', "[3]", "\xff"])
    def test_a_file_that_is_none(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "fault injections.json"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match="--resihp-inject @") as error:
            ResihpConfig(resihp_inject=[f"@{path}"]).slowdowns()
        assert "\n" not in str(error.value)

    def test_no_file(self) -> None:
        with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
            ResihpConfig(resihp_inject=["@nowhere.json"]).injections()


class TestWhatHolds:
    def test_one_comes_on_top_of_the_other_and_all_end_together(self) -> None:
        slow = Slowness().after(Slowdown((3,), 0.6)).after(Slowdown((5, 1), 0.3)).after(Slowdown((3,), 0.5))
        assert (slow.speed(3), slow.speed(5)) == (0.5, 1.0)
        assert slow.link(1, 5) == slow.link(5, 1) == 0.3 and slow.link(1, 3) == 1.0
        assert slow.after(Slowdown()) == Slowness()

    def test_full_speed_ends_one(self) -> None:
        slow = Slowness().after(Slowdown((3,), 0.6)).after(Slowdown((1, 5), 0.3))
        assert slow.after(Slowdown((3,), 1.0)) == Slowness(links={(1, 5): 0.3})
        assert slow.after(Slowdown((5, 1), 1.0)) == Slowness(speeds={3: 0.6})

    @given(
        speeds=st.dictionaries(st.integers(0, 9), FACTORS),
        links=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(5, 9)), FACTORS),
    )
    def test_it_travels_as_json(self, speeds: dict[int, float], links: dict[tuple[int, int], float]) -> None:
        slow = Slowness(speeds, links)
        notice = SlownessDesk(10, emulated=True, holds=slow).notice()
        heard = NOTICES.read(NOTICES.write(notice, "the coordinator")).body
        assert isinstance(heard, SlownessChanged) and Slowness.of(heard) == slow


class TestTheDesk:
    def test_what_is_asked_for_holds_and_is_told(self) -> None:
        desk = SlownessDesk(8, emulated=True)
        desk.take(Slowdown((3,), 0.6), dead=())
        desk.take(Slowdown((1, 5), 0.3), dead=())
        assert desk.holds == Slowness({3: 0.6}, {(1, 5): 0.3})
        notice = desk.notice()
        assert notice.by_agents is False and Slowness.of(notice) == desk.holds

    @pytest.mark.parametrize(
        ("emulated", "slowdown", "said"),
        [
            (True, Slowdown((8,), 0.6), "there is no worker 8; the job has 0 to 7"),
            (True, Slowdown((1, 9), 0.6), "there is no worker 9"),
            (True, Slowdown((2,), 0.6), "worker 2 is dead"),
            (False, Slowdown((0, 1), 0.6), "links can only be slowed on the emulated clock"),
            (None, Slowdown((0,), 0.6), "the job is still starting"),
        ],
    )
    def test_what_cannot_be_is_refused_and_changes_nothing(
        self, emulated: bool | None, slowdown: Slowdown, said: str
    ) -> None:
        desk = SlownessDesk(8, emulated)
        with pytest.raises(ConfigError, match=said):
            desk.take(slowdown, dead={2})
        assert desk.holds == Slowness()

    def test_all_workers_ask_for_what_is_scheduled_and_it_is_done_once(self) -> None:
        desk = SlownessDesk(8, emulated=True)
        assert [desk.is_new(number) for number in (0, 0, 1, 0, 1)] == [True, False, True, False, False]


class TestSchedule:
    def test_each_is_asked_for_once_when_its_iteration_begins(self) -> None:
        asked: list[tuple[int, int]] = []
        slowdowns = (Slowdown((1,), 0.5, 3), Slowdown((), 1.0, 5), Slowdown((2,), 0.5, 3))
        schedule = ScheduledSlowdowns(slowdowns, lambda index, slowdown: asked.append((index, len(slowdown.workers))))
        for iteration, expected in ((1, []), (3, [(0, 1), (2, 1)]), (3, []), (4, []), (7, [(1, 0)]), (8, [])):
            asked.clear()
            schedule.begin(iteration)
            assert asked == expected
