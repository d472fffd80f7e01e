# SPDX-License-Identifier: Apache-2.0
"""The stand-in in a process that writes checkpoints: spawned anew, and with copies of the trainer's tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_resihp.cpu.checkpoint_writer import preload_tensors

REPOSITORY = Path(__file__).resolve().parents[3]
SPAWN_S = 100.0
SCRIPT = """
import megatron_resihp.cpu
if __name__ == "__main__":
    megatron_resihp.cpu.install(force=True)
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller
    PersistentAsyncCaller._get_process(0, "spawn")
    import os
    request = AsyncRequest(os.mkdir, [os.environ["MADE"]], [])
    PersistentAsyncCaller._persistent_queue.put(request)
    PersistentAsyncCaller._persistent_queue.put("DONE")
    PersistentAsyncCaller._persistent_process.join(90)
    assert PersistentAsyncCaller._persistent_process.exitcode == 0
"""


def test_what_is_written_does_not_change_with_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = torch.zeros(3)
    [(path, key, (data, [(item, copied)]))] = preload_tensors([("path", "key", ([], [("item", tensor)]))])
    tensor += 1
    assert (path, key, data, item) == ("path", "key", [], "item") and torch.equal(copied, torch.zeros(3))


@pytest.mark.nightly
def test_a_spawned_writer_finds_a_device(tmp_path: Path) -> None:
    """Megatron's chooses its device first, and none would be there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"MADE": str(tmp_path / "made"), "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=SPAWN_S)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "made").is_dir()
