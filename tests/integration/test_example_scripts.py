# SPDX-License-Identifier: Apache-2.0
"""Launch scripts of Megatron-LM itself, with `resihp check` or `resihp launch` in torchrun's place.

Only the word `torchrun` is replaced and `--resihp` added. The environment variable MEGATRON_LM_DIR names the checkout,
at tag core_v0.19.0; it is not written to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from test_nodes import free_port
from test_real_script import CHECKOUT, WHY

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHECKOUT not in os.environ, reason=WHY)]

GPT, LLAMA, MIXTRAL = (
    "examples/gpt3/train_gpt3_175b_distributed.sh",
    "examples/llama/train_llama3_8b_h100_fp8.sh",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh",
)  # fmt: skip
FP8: Final = {"--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather"}
"""What needs GPUs."""
NOT_YET: Final = {"--step-batch-size-schedule"}
"""What is still to be let in."""
BOTH: Final = "Cannot specify both --step-batch-size-schedule and --global-batch-size"
"""With this, Megatron 0.19 itself ends the example."""
UNQUOTED: Final = "2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536: no flag takes these words"
"""With these, too, once the two are not both given: the script lets the shell divide the schedule into words."""


def run_script(
    script: str, directory: Path, command: str, arguments: Sequence[str], **edits: str
) -> tuple[int, str, str]:
    """Run a script with another command in torchrun's place; that one's exit code, and what they say.

    Args:
        command: what stands there, after `resihp`.
        arguments: of the script.
        edits: of its text, word by word, as its comments ask for.
    """
    checkout = Path(os.environ[CHECKOUT])
    for name in ("pretrain_gpt.py", "megatron", "gpt_builders.py"):
        if not (directory / name).exists():
            (directory / name).symlink_to(checkout / name)
    text = (checkout / script).read_text()
    for variable, value in edits.items():
        assert f"\n{variable}=" in text
        text = "\n".join(
            f"{variable}={value}" if line.startswith(f"{variable}=") else line for line in text.split("\n")
        )
    (directory / "train.sh").write_text(text)
    shim = directory / "torchrun"
    # Not every script ends with the code of what it runs.
    run = f'{sys.executable} -m megatron_resihp.cli {command} "$@" --resihp'
    shim.write_text(f"#!/bin/sh\n{run}\necho $? > {directory}/code\n")
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "train.sh", *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    return int((directory / "code").read_text()), done.stdout, done.stderr


def check(script: str, directory: Path, arguments: Sequence[str] = (), **edits: str) -> dict[str, Any]:
    """What `resihp check` says of a script."""
    code, out, errors = run_script(script, directory, "check --json", arguments, **edits)
    found: dict[str, Any] = json.loads(out)
    assert code == (0 if found["let_in"] else 2), errors
    return found


def refused(found: dict[str, Any]) -> set[str]:
    """The flags that keep a job out, or the reasons that name none."""
    return {refusal["flag"] or refusal["reason"] for refusal in found["refusals"]}


def test_llama(tmp_path: Path) -> None:
    found = check(LLAMA, tmp_path)
    assert refused(found) <= FP8
    assert found["unknown"] == []


def test_mixtral(tmp_path: Path) -> None:
    """PP 4 × EP 8, of which the script has a node of eight workers, as Megatron itself finds out."""
    arguments = ["checkpoints", "tokenizer.model", "data"]
    assert refused(check(MIXTRAL, tmp_path, arguments)) == {
        "8 workers are not a multiple of experts' TP x EP x PP = 32, so no plan exists"
    }
    found = check(MIXTRAL, tmp_path, arguments, NNODES="4")
    assert found["job"].startswith("pretrain_gpt.py, 32 workers")
    assert not refused(found)


def test_gpt_on_the_nodes_that_its_degrees_need(tmp_path: Path) -> None:
    """TP 8 × PP 16, of which the script has one node; its comment says to change that."""
    found = check(GPT, tmp_path, ["checkpoints", "logs", "vocab", "merges", "data"], NUM_NODES="16")
    own = [reason for reason in refused(found) if BOTH not in reason and UNQUOTED not in reason]
    assert set(own) <= NOT_YET


def test_gpt_as_it_is(tmp_path: Path) -> None:
    found = check(GPT, tmp_path, ["checkpoints", "logs", "vocab", "merges", "data"])
    assert any("8 workers are not a multiple of TP x PP = 128" in reason for reason in refused(found))


def test_launch_says_what_check_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker has the same arguments, and one line for each reason."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    lines = [f"{each['reason']}; {each['fix']}" for each in check(LLAMA, tmp_path, GPUS_PER_NODE="1")["refusals"]]
    code, _, errors = run_script(LLAMA, tmp_path, "launch --stand-in", [], GPUS_PER_NODE="1")
    assert code == 2, errors
    said = [line.strip() for line in errors.splitlines()]
    assert lines and [line for line in lines if f"resihp: {line}" not in said] == []
