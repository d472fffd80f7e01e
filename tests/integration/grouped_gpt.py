# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with Megatron's experts for --moe-grouped-gemm, on any device (`grouped_layers.py`), and an
Adam that counts steps as fused ones do (fused_gpt.py).

In a job it does what files in RUN_DIR/wishes ask for, as wishing_gpt.py does; without the plugin it notes steps as
noting_gpt.py does.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import fused_gpt  # noqa: E402, F401
import pretrain_gpt  # noqa: E402
from grouped_layers import grouped_experts  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from noting_gpt import run_or_note  # noqa: E402

if __name__ == "__main__":
    made = grouped_experts()
    backends.LocalSpecProvider.grouped_mlp_modules = lambda self, grouped: made  # type: ignore[method-assign]
    run_or_note(pretrain_gpt)
