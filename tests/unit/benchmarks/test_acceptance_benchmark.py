# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/acceptance.py` says of launch configurations."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "acceptance.py"
PLAIN = "--tensor-model-parallel-size 2 --num-layers 4 --bf16 --use-mcore-models --recompute-granularity".split()


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "acceptance", module)
    spec.loader.exec_module(module)
    return module


def test_configurations_are_accepted_or_the_flags_that_keep_them_out_are_named(acceptance: ModuleType) -> None:
    recipes = [
        {"name": "plain", "group": "official_tests", "args": [*PLAIN, "selective"]},
        {"name": "one", "group": "others", "args": [*PLAIN, "full", "--context-parallel-size", "2"]},
        {"name": "two", "group": "others", "args": ["--use-nccl-ub", "--context-parallel-size", "2", "--made-up"]},
        {"name": "none", "group": "others", "args": ["--num-layers", "many"]},
        {"name": "own", "group": "others", "args": [*PLAIN, "full", "--made-up"]},
        {"name": "hybrid", "group": "official_hybrid", "args": []},
    ]
    found = acceptance.read_recipes("\n".join(map(json.dumps, recipes)))
    assert found == acceptance.read_recipes(json.dumps(recipes)) == recipes[:5]
    check = acceptance.checker()
    answers = [check(recipe["name"], recipe["args"]) for recipe in found]
    assert [answer.accepted for answer in answers] == [True, False, False, False, False]
    assert "invalid int value" in answers[3].unparsable
    assert acceptance.summary(answers) == {
        "recipes": 5, "accepted": 1, "share": 0.2, "unparsable": 1,
        "refused_by": {"--context-parallel-size": 2, "--made-up": 2, "--use-nccl-ub": 1},
        "refused_by_alone": {"--context-parallel-size": 1, "--made-up": 1}, "only_unknown": 1,
    }  # fmt: skip


def test_lists_of_megatrons_test_harness_are_several_words(acceptance: ModuleType) -> None:
    words = acceptance.as_words(["--modules", "[attn mlp]", "--split", "9,1"])
    assert words == ["--modules", "attn", "mlp", "--split", "9,1"]


@pytest.mark.parametrize("value", ["[0,1,1]", "[0]*3+[1]", "([0]*3+[1]*5)"])
def test_a_pattern_of_layers_is_one_word(acceptance: ModuleType, value: str) -> None:
    words = ["--num-experts", "8", "--moe-layer-freq", value]
    assert acceptance.as_words(words) == words and acceptance.as_words(["[moe_act]"]) == ["moe_act"]
    assert acceptance.checker()("pattern", words).accepted


def test_shell_variables_may_stand_for_numbers(acceptance: ModuleType) -> None:
    words = ["--seed", "${REPEAT}", "--save", "$OUTPUT"]
    assert acceptance.checker()("variables", words).accepted
    assert not acceptance.checker()("words", ["--seed", "REPEAT"]).accepted


def test_values_that_a_script_is_given_are_missing(acceptance: ModuleType) -> None:
    assert acceptance.checker()("example", ["--vocab-file", "--data-path", "--bf16", "--seed"]).accepted
    assert acceptance.checker()("example", ["--save", "--made-up"]).refused == ("--made-up",)


def test_a_schedule_of_batches_is_one_text(acceptance: ModuleType) -> None:
    schedule = "--step-batch-size-schedule 0:8 1K:4"
    words = f"--seq-length 10 {schedule} --train-samples".split()
    assert acceptance.quoted(words) == ["--seq-length", "10", *schedule.split(maxsplit=1), "--train-samples"]
    check = acceptance.checker()
    assert check("it does not shrink", [*words, "100"]).accepted
    assert check("it shrinks", [*words, "101"]).refused == ("--step-batch-size-schedule",)
