# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with an Adam that counts steps as fused ones do, for each parameter group, on any device.

Megatron loads checkpoints of its distributed optimizer with such ones only. Jobs of this package may have wishes.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

PRETRAIN = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"
WISHING = Path(__file__).with_name("wishing_gpt.py")


class FusedAdam(torch.optim.Optimizer):
    """Apex's, as far as Megatron uses it."""

    def __init__(self, params: Any, *, adam_w_mode: bool, capturable: bool, **settings: Any) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in stepped:
                if not self.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[parameter].update(zeros)
            beta1, beta2 = group["betas"]
            adamw(
                stepped, [parameter.grad for parameter in stepped],
                *([self.state[parameter][name] for parameter in stepped] for name in ("exp_avg", "exp_avg_sq")),
                [], [torch.tensor(group["step"] - 1.0) for _ in stepped], foreach=False, amsgrad=False, beta1=beta1,
                beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip


optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
distrib_optimizer.Adam = FusedAdam
distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True

if __name__ == "__main__":
    runpy.run_path(str(WISHING if "RESIHP_RUN_DIR" in os.environ else PRETRAIN), run_name="__main__")
