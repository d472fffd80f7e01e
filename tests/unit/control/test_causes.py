# SPDX-License-Identifier: Apache-2.0
"""What killed a worker is told where the kernel, the worker's last words or a fault injection say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_resihp.control.causes import FRESH_S, MemoryKills, ending, known_cause

TRAINING = "iteration 7/60 | lm loss: 4.5E+00 | number of nan iterations: 0 |"


@pytest.mark.parametrize(
    ("code", "lines", "out_of_memory", "said"),
    [
        (-9, [TRAINING], True, "out-of-memory killer, exit signal 9"),
        (-9, [TRAINING], False, "exit signal 9"),
        (-9, ["resihp: the device has failed; this worker dies"], False, "the device has failed, exit signal 9"),
        (-11, [TRAINING], False, "exit signal 11 (SIGSEGV)"),
        (-6, ["terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: unspecified", ""],
         False, "what():  CUDA error: unspecified, exit signal 6 (SIGABRT)"),
        (3, [TRAINING, "Traceback (most recent call last):", "ValueError: no such shard", ""], False,
         "ValueError: no such shard, exit code 3"),
        (3, [TRAINING], True, "exit code 3"),
    ],
)  # fmt: skip
def test_the_cause_is_told_with_the_code(code: int, lines: list[str], out_of_memory: bool, said: str) -> None:
    assert ending(code, known_cause(code, lines, out_of_memory)) == said


def test_a_kill_for_want_of_memory_explains_one_death_and_only_for_a_while(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"

    def count(kills: int) -> None:
        counter.write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 0\n")

    count(4)
    kills = MemoryKills([tmp_path / "none", counter])
    assert not kills.take(0.0), "those before this job are none of its own"
    count(5)
    kills.look(10.0)
    assert kills.take(15.0) and not kills.take(15.1)
    count(6)
    kills.look(20.0)
    assert not kills.take(20.0 + FRESH_S + 1), "what died a minute later died of something else"
    counter.unlink()
    assert not MemoryKills([counter]).take(0.0)
