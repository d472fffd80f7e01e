# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` gives back the function as it is: compiling takes minutes on a CPU. May import torch."""

import sys
from collections.abc import Callable
from typing import Any

import torch


def _as_it_is(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Works as `torch.compile(function)`, `@torch.compile` and `@torch.compile(option=...)`."""
    return _as_it_is if function is None else function


def install() -> None:
    torch.compile = _as_it_is
    megatron_jit = sys.modules.get("megatron.core.jit")
    if megatron_jit is not None:
        # Megatron keeps the real one for modules not imported yet, and has wrapped the fused functions of the others.
        megatron_jit.disable_jit_fuser()
        torch.compiler.set_stance("force_eager")
