# SPDX-License-Identifier: Apache-2.0
"""Layers that treat a first micro-batch unlike the others, under a plan in whose order no micro-batch is the first.

Megatron's schedules tell Transformer Engine's layers which micro-batch an iteration begins with. Its backward pass
overwrites the weights' gradients instead of adding to them, and its forward pass casts the weights to 8 bits for all
others. A heterogeneous plan may run its backward pass after others', and its ops are not run by those schedules. May
import torch.
"""

from collections.abc import Iterable

import torch


def treat_all_alike(chunks: Iterable[torch.nn.Module]) -> None:
    """Let each micro-batch add its gradients and cast the weights that there are; a layer does so if it isn't told."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch"):
                # Megatron's layers then don't pass on what they know.
                module.disable_parameter_transpose_cache = True
