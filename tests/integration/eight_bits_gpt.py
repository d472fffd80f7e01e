# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py whose column-parallel layers round as Transformer Engine's do in 8 bits, on any device.

With --fp8-format their input, weight and output's gradient are rounded to 8 bits, by a scale that follows from the
largest element of the tensor at hand (--fp8-recipe tensorwise). Experts have such layers, too, and an expert's input is
of all tokens that it gets at a time.

In a job it does what files in RUN_DIR/wishes ask for, as wishing_gpt.py does; without the plugin it notes steps as
noting_gpt.py does.
"""

import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from noting_gpt import run_or_note  # noqa: E402


def rounded(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    largest = values.abs().max().float() if values.numel() else torch.zeros(())
    scale = torch.finfo(kind).max / largest if largest > 0 else torch.ones(())
    return ((values.float() * scale).to(kind).float() / scale).to(values.dtype)


class Rounding(torch.autograd.Function):
    """Rounds a tensor, and passes its gradient on."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return rounded(values, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class RoundingOfGradients(torch.autograd.Function):
    """Passes a tensor on, and rounds its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return rounded(gradient, torch.float8_e5m2)


class EightBitLinear(ColumnParallelLinear):
    def forward(self, input_: torch.Tensor, *positional: Any, **options: Any) -> Any:
        if self.config.fp8 is None:
            return super().forward(input_, *positional, **options)
        output, bias = super().forward(Rounding.apply(input_), Rounding.apply(self.weight), **options)
        return RoundingOfGradients.apply(output), bias


if __name__ == "__main__":
    # A configuration with experts in 8 bits asks for Transformer Engine's.
    transformer_config.is_te_min_version = lambda *_: True
    backends.LocalSpecProvider.column_parallel_linear = lambda self: EightBitLinear  # type: ignore[method-assign]
    run_or_note(pretrain_gpt)
