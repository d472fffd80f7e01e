# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py whose checkpoint writers and clocks do what files in RUN_DIR/wishes ask for.

With `hold-ITERATION` all writers of that checkpoint write half a file and wait for the file `write-ITERATION`; with
`hold-ITERATION-RANK` the writer of that rank does. With `late-WORKER` this worker believes that it began years ago.
With `die-ITERATION-WORKER` this worker dies once the tracker names that checkpoint; the others wait for it in the save.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # noqa: E402
from megatron.training import checkpointing, get_args, training  # noqa: E402

from megatron_resihp.integration.saves import writer  # noqa: E402

WISHES = Path(os.environ["RESIHP_RUN_DIR"]) / "wishes"
HOLD_S = 60.0

plain_write = FileSystemWriterAsync.write_preloaded_data
plain_forward_step = pretrain_gpt.forward_step
plain_is_last_rank = checkpointing.is_last_rank


def write_when_told(transforms: Any, local_proc_idx: int, write_bucket: Any, *others: Any, **options: Any) -> Any:
    path = Path(write_bucket[0])
    iteration, rank = int(path.parent.name.removeprefix("iter_")), int(re.findall(r"\d+", path.name)[0])
    holding = (WISHES / f"hold-{iteration}", WISHES / f"hold-{iteration}-{rank}")
    deadline = time.monotonic() + HOLD_S
    while any(file.exists() for file in holding) and not (WISHES / f"write-{iteration}").exists():
        path.write_text("half of it")
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return plain_write(transforms, local_proc_idx, write_bucket, *others, **options)


def is_last_rank() -> bool:
    """Megatron asks once all have written, before all meet for the last time in a save."""
    iteration, deadline = get_args().curr_iteration + 1, time.monotonic() + HOLD_S
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(get_args().save))
    while (WISHES / f"die-{iteration}-{os.environ['RESIHP_WORKER']}").exists():
        if tracker.exists() and tracker.read_text() == str(iteration):
            os.kill(os.getpid(), signal.SIGKILL)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return bool(plain_is_last_rank())


def forward_step(*positional: Any) -> Any:
    if (WISHES / f"late-{os.environ['RESIHP_WORKER']}").exists():
        training._TRAIN_START_TIME = 0.0
    return plain_forward_step(*positional)


if __name__ == "__main__":
    # In these tests writers are forked, and so have this function.
    writer.READY_S = 0.0
    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_when_told)
    checkpointing.is_last_rank = is_last_rank
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
