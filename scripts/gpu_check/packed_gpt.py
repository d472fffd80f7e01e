# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with an attention for packed documents that needs no Transformer Engine, on any device."""

import runpy
from pathlib import Path

import megatron_resihp

megatron_resihp.enable()

from megatron_resihp import cpu  # noqa: E402
from megatron_resihp.cpu.megatron_parts import install_packed_attention  # noqa: E402

PRETRAIN = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"

if not cpu.installed():
    install_packed_attention()
runpy.run_path(str(PRETRAIN), run_name="__main__")
