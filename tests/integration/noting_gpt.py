# SPDX-License-Identifier: Apache-2.0
"""A training script: scripts/pretrain_gpt.py, whose last rank writes down the unrounded loss and gradient norm of each
step to RUN_DIR/notes. Without --resihp these are stock Megatron's, to compare a job's own with.
"""

import functools
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import PRETRAIN
from nursery import MOCK_DATA_SIZE


def note_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """train_step that remembers what it returned."""
    steps: dict[int, tuple[float, float]] = {}

    @functools.wraps(original)
    def train_step(*positional: Any, iteration: int, **options: Any) -> Any:
        result = original(*positional, iteration=iteration, **options)
        losses, norm = result[0], result[5]
        if losses and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            steps[iteration + 1] = float(losses["lm loss"]), float(norm)
            Path(os.environ["RUN_DIR"], "notes").write_text(json.dumps(steps))
        return result

    return train_step


def run_or_note(script: Any) -> None:
    """Run scripts/pretrain_gpt.py, which was imported as `script`: in a job of this package with the forward step of
    wishing_gpt.py, and without it noting steps."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import training

    MockGPTLowLevelDataset.size = MOCK_DATA_SIZE
    if "RESIHP_RUN_DIR" in os.environ:
        import wishing_gpt

        script.forward_step = wishing_gpt.forward_step
    else:
        training.train_step = note_steps(training.train_step)
    script.main()


if __name__ == "__main__":
    import megatron_resihp

    megatron_resihp.enable()
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import training

    MockGPTLowLevelDataset.size = MOCK_DATA_SIZE
    training.train_step = note_steps(training.train_step)
    runpy.run_path(str(PRETRAIN), run_name="__main__")
