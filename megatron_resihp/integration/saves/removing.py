# SPDX-License-Identifier: Apache-2.0
"""Patch: what Megatron removes before it makes a non-persistent checkpoint.

Megatron keeps the newest. That may be half of a save that a death has cut short, so the one that the tracker names
stays, too. Replaces checkpointing.cleanup_old_non_persistent_checkpoint. May import torch and `control`.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_resihp.control.worker.saved_state import latest_in

PREFIX = "iter_"


def wrap_cleanup(original: Callable[..., None]) -> Callable[..., None]:
    """Let Megatron remove only what is older than the last whole checkpoint."""

    @functools.wraps(original)
    def cleanup_old_non_persistent_checkpoint(save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False) -> None:
        if dist.get_rank() == 0:  # it alone removes, so no other has to look
            original(save_dir, max(leave_ckpt_num, _needed(Path(save_dir))), do_async)

    return cleanup_old_non_persistent_checkpoint


def _needed(directory: Path) -> int:
    """How many of the newest are to stay; all, where nobody knows which one is whole."""
    whole = latest_in(directory) or 0
    found = [int(path.name.removeprefix(PREFIX)) for path in directory.rglob(f"{PREFIX}*")]
    return sum(iteration >= whole for iteration in found)
