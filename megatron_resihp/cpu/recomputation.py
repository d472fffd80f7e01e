# SPDX-License-Identifier: Apache-2.0
"""What Megatron needs to compute an output again whose memory it has freed (`--recompute-modules layernorm` and the
like).

It has a C++ compiler make an extension at the first backward pass, and takes each of these modules for one in 8 bits,
asking Transformer Engine about it. May import torch and megatron.
"""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from megatron.core.tensor_parallel import random
from torch import Tensor


def install() -> None:
    random._share_storage_ext = SimpleNamespace(share_storage=refill)
    if not random.HAVE_TE:
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = _as_always


def refill(freed: Tensor, recomputed: Tensor) -> None:
    """Give an output whose memory was freed the numbers that were computed again; all views of it see them."""
    memory, numbers = freed.untyped_storage(), recomputed.untyped_storage()
    memory.resize_(numbers.nbytes())
    memory.copy_(numbers)


def _as_always(**_options: Any) -> AbstractContextManager[None]:
    return nullcontext()
