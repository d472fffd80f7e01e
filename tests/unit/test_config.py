# SPDX-License-Identifier: Apache-2.0
"""The --resihp* flags: how fault injections are written, and that flags, help and dataclass are one."""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.config import (
    INJECTION_POINTS,
    STRATEGIES,
    ConfigError,
    Injection,
    ResihpConfig,
    ScheduledPlan,
    add_arguments,
)
from megatron_resihp.integration.probes import fault_injection
from megatron_resihp.integration.probes.fault_injection import Injections
from megatron_resihp.planner.strategies.registry import STRATEGIES as REGISTRY
from megatron_resihp.planner.strategies.registry import Change


def parse(*command: str) -> ResihpConfig:
    return ResihpConfig.from_namespace(add_arguments(argparse.ArgumentParser()).parse_args(command))


class TestInjection:
    @given(
        action=st.sampled_from(["kill", "stop", "rebuild"]),
        worker=st.integers(0, 4096),
        iteration=st.integers(1, 10**6),
        point=st.none() | st.sampled_from(INJECTION_POINTS),
    )
    def test_what_is_written_is_meant(self, action: str, worker: int, iteration: int, point: str | None) -> None:
        text = f"{action}:{worker}@{iteration}" + (f":{point}" if point else "")
        assert Injection.parse(text) == Injection(action, worker, iteration, point or "forward")

    @pytest.mark.parametrize(
        "text",
        ["", "kill", "kill:3", "kill:@3", "kill:a@3", "maim:3@10", "kill:3@10:", "kill:3@10 ", "kill:-1@3", "kill:3@0"],
    )
    def test_another_form_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"ACTION:WORKER@ITERATION\[:POINT\], e\.g\. kill:3@10:backward") as error:
            Injection.parse(text)
        assert repr(text) in str(error.value) and "\n" not in str(error.value)

    def test_an_unknown_point_is_answered_with_the_known(self) -> None:
        with pytest.raises(ConfigError, match="no point 'lunch'; choose from forward, backward, p2p"):
            Injection.parse("kill:3@10:lunch")


class TestPlans:
    def test_a_plan_comes_from_a_file_at_an_iteration(self) -> None:
        assert ScheduledPlan.parse("runs/plan@home.json@7") == ScheduledPlan(Path("runs/plan@home.json"), 7)
        assert ScheduledPlan.parse("plan.json").iteration == 1

    def test_another_form_is_refused_with_an_example(self) -> None:
        with pytest.raises(ConfigError, match=r"e\.g\. plan\.json@10"):
            ScheduledPlan.parse("")

    def test_earlier_plans_come_first(self) -> None:
        plans = parse("--resihp-plan", "plan.json@9", "auto", "plan.json@3").plans()
        assert [plan.iteration for plan in plans] == [3, 9]


class TestFlags:
    def test_nothing_given(self) -> None:
        assert parse() == ResihpConfig()
        assert not parse().resihp and parse().injections() == ()

    def test_all_given(self) -> None:
        config = parse(
            "--resihp", "--resihp-inject", "kill:3@10", "stop:0@2:norm", "--resihp-record-samples",
            "--resihp-record-digests", "--resihp-answer-timeout", "2.5",
        )  # fmt: skip
        assert config == ResihpConfig(
            resihp=True, resihp_inject=["kill:3@10", "stop:0@2:norm"], resihp_record_samples=True,
            resihp_record_digests=True, resihp_answer_timeout=2.5,
        )  # fmt: skip
        assert config.injections() == (Injection("kill", 3, 10), Injection("stop", 0, 2, "norm"))

    def test_every_field_is_a_flag_with_its_help(self) -> None:
        # Lines end after hyphens, too.
        text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split()).replace("- ", "-")
        for field in fields(ResihpConfig):
            assert f"--{field.name.replace('_', '-')}" in text
            assert field.metadata["help"].split(".")[0] in text
        assert "(default uniform)" in text and "(default 0.01)" in text
        assert all(point in text for point in INJECTION_POINTS)

    def test_a_bad_drill_is_found_when_injections_are_asked_for(self) -> None:
        with pytest.raises(ConfigError):
            parse("--resihp-inject", "kill").injections()


class TestPlanning:
    def test_the_strategies_are_those_that_plan_in_place(self) -> None:
        in_place = {name for name, entry in REGISTRY.items() if entry.change is Change.IN_PLACE}
        assert set(STRATEGIES) == {"uniform", *in_place}

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"resihp_strategy": "restart"}, "--resihp-strategy restart is no strategy"),
            ({"resihp_strategy": "jiont"}, "--resihp-strategy jiont is no strategy; do you mean joint. choose from"),
            ({"resihp_carrier": "pigeon"}, "--resihp-carrier pigeon is not a carrier; choose from host, device"),
            ({"resihp_act": "sleep"}, "--resihp-act sleep is no mode; choose from observe, ask, act"),
            ({"resihp_act": "act"}, "needs a strategy that reacts to slow workers"),
            ({"resihp_answer_timeout": 0.0}, "--resihp-answer-timeout 0 is not a time to wait; give more than 0"),
            ({"resihp_memory_reserve": 100.0}, "--resihp-memory-reserve 100 is invalid; give a percentage from 0"),
            ({"resihp_plan_wait": -1.0}, "--resihp-plan-wait -1 is invalid; give 0 to 3600 seconds"),
            ({"resihp_seconds_between_changes": float("nan")}, "--resihp-seconds-between-changes nan is invalid"),
        ],
    )
    def test_what_can_not_be(self, flags: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            ResihpConfig(**flags).check()

    def test_what_can_be(self) -> None:
        ResihpConfig(resihp_act="act", resihp_strategy="joint", resihp_seconds_between_changes=0.0).check()


class TestStriking:
    """Which fault injection strikes where; nobody is hurt, signals are only noted."""

    @pytest.fixture(autouse=True)
    def signals(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        sent: list[str] = []

        def note(pid: int, number: signal.Signals) -> None:
            assert pid == os.getpid()
            sent.append(number.name)

        monkeypatch.setattr(fault_injection.os, "kill", note)
        return sent

    def test_at_the_first_visit_from_its_iteration_on_and_once(self, signals: list[str]) -> None:
        told: list[Injection] = []
        mine = Injections((Injection("kill", 3, 10, "norm"), Injection("stop", 2, 1, "norm")), 3, told.append)
        mine.reach("norm", 9)
        mine.reach("forward", 10)
        assert not signals and not told
        mine.reach("norm", 12)
        mine.reach("norm", 12)
        assert signals == ["SIGKILL"] and told == [Injection("kill", 3, 10, "norm")]

    def test_points_that_nobody_waits_for_need_no_hook(self, signals: list[str]) -> None:
        all_injections = (Injection("stop", 1, 2, "p2p"), Injection("kill", 1, 3), Injection("kill", 0, 1, "norm"))
        mine = Injections(all_injections, 1, lambda injection: None)
        assert mine.points() == {"p2p", "forward"}
        mine.reach("p2p", 2)
        assert signals == ["SIGSTOP"] and mine.points() == {"forward"}

    def test_a_rebuild_hurts_nobody(self, signals: list[str]) -> None:
        with pytest.raises(fault_injection.StagedError):
            Injections((Injection("rebuild", 0, 1),), 0, lambda injection: None).reach("forward", 1)
        assert not signals
