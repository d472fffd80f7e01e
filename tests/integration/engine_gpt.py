# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py whose column-parallel layers keep what Transformer Engine's keep in 8 bits, on any device.

Each has a history of its weight's largest elements, an entry for each attempt at an iteration, made in forward and
equal in a tensor-parallel group; outputs are scaled by it. It is extra state, neither parameter nor buffer. A micro-
batch that a layer was told to be the first overwrites the weight's gradients in its backward pass, and with
--fp8-format its forward pass takes a copy of the weight that the other micro-batches use.

In a job it does what files in RUN_DIR/wishes ask for, as wishing_gpt.py does. Without the plugin it notes steps
as noting_gpt.py does.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.training import training  # noqa: E402
from noting_gpt import run_or_note  # noqa: E402

LENGTH = 32
attempts = 0


class EngineLinear(ColumnParallelLinear):
    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.history = torch.zeros(LENGTH)
        self.attempt = 0
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = self.config.disable_parameter_transpose_cache
        self.cast: torch.Tensor | None = None

    def forward(self, input_: torch.Tensor, *positional: Any, **options: Any) -> Any:
        if self.training and torch.is_grad_enabled() and self.attempt != attempts:
            self.attempt = attempts
            self._note()
        first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
        self.is_first_microbatch = False
        weight = self.weight
        if self.config.fp8 is not None and first is not None:
            if first or self.cast is None:
                self.cast = weight.detach().clone()
            weight = weight + (self.cast - weight).detach()
        output, bias = super().forward(input_, weight, **options)
        output = output * (1 + self.history.mean().item())
        if first and output.requires_grad:
            output.register_hook(self._forget_gradients)
        return output, bias

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history.copy_(state["history"])

    def _note(self) -> None:
        largest = self.weight.detach().abs().max().float()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.tp_group)
        self.history = torch.cat([largest.view(1).cpu(), self.history[:-1]])

    def _forget_gradients(self, _: torch.Tensor) -> None:
        self.weight.main_grad.zero_()


def count_attempts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*positional: Any, **options: Any) -> Any:
        global attempts
        attempts += 1
        return original(*positional, **options)

    return train_step


if __name__ == "__main__":
    backends.LocalSpecProvider.column_parallel_linear = lambda self: EngineLinear  # type: ignore[method-assign]
    training.train_step = count_attempts(training.train_step)
    run_or_note(pretrain_gpt)
