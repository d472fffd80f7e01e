# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with Megatron's experts for --moe-grouped-gemm, on any device (`grouped_layers.py`), and an
Adam that counts steps as fused ones do (fused_gpt.py).

In a job it does what files in RUN_DIR/wishes ask for, as wishing_gpt.py does; without the plugin it notes steps as
noting_gpt.py does.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import fused_gpt  # noqa: E402, F401
import pretrain_gpt  # noqa: E402
from grouped_layers import grouped_experts  # noqa: E402
from megatron.core.models.backends import LocalSpecProvider  # noqa: E402
from noting_gpt import run_or_note  # noqa: E402


def main() -> None:
    """Train, with grouped products where the flag says so."""
    one_after_another, grouped = LocalSpecProvider.grouped_mlp_modules, grouped_experts()
    LocalSpecProvider.grouped_mlp_modules = (  # type: ignore[method-assign]
        lambda self, wanted: grouped if wanted else one_after_another(self, wanted)
    )
    run_or_note(pretrain_gpt)


if __name__ == "__main__":
    main()
