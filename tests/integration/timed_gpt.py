# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py whose forward steps Megatron's search for stragglers times, as in Megatron's own script."""

import functools
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
from megatron.core.utils import StragglerDetector  # noqa: E402

timer = StragglerDetector()
plain_forward_step = pretrain_gpt.forward_step


@functools.wraps(plain_forward_step)
def forward_step(*positional: Any, **options: Any) -> Any:
    with timer:
        return plain_forward_step(*positional, **options)


if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
