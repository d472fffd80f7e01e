# SPDX-License-Identifier: Apache-2.0
"""A training script that overlaps experts' communication in 32 bits: wishing_gpt.py with the plugin, noting_gpt.py
without it.

Megatron takes --overlap-moe-expert-parallel-comm in 16 bits only, where a wrong gradient of a few per mille would pass
for rounding. Its schedule itself knows no types.
"""

import functools
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_as_16_bits(original: Callable[..., None]) -> Callable[..., None]:
    """TransformerConfig.__post_init__ that checks a configuration of 32 bits as one of 16."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        own, self.bf16 = self.bf16, not self.fp16
        original(self)
        self.bf16 = own

    return __post_init__


if __name__ == "__main__":
    import megatron_resihp

    megatron_resihp.enable()
    from megatron.core.transformer.transformer_config import TransformerConfig

    TransformerConfig.__post_init__ = check_as_16_bits(TransformerConfig.__post_init__)  # type: ignore[method-assign]
    script = "wishing_gpt.py" if "RESIHP_RUN_DIR" in os.environ else "noting_gpt.py"
    runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")
