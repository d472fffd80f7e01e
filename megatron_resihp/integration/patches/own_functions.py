# SPDX-License-Identifier: Apache-2.0
"""What a script may set in Megatron's configurations besides flags, and a job with --resihp would not heed.

Pure; imports the standard library only.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

FUNCTIONS: Final = {
    "moe_grad_scale_func": "losses of experts would be weighed otherwise where replicas have unequal shares",
    "mtp_grad_scale_func": "losses of predictions would be weighed otherwise where replicas have unequal shares",
    "finalize_model_grads_func": "heterogeneous plans sum gradients themselves",
    "no_sync_func": "heterogeneous plans sum gradients themselves",
}
"""Of the model's configuration, and why each can't be called."""


def unheeded(model: Any, optimizers: Sequence[Any]) -> list[str]:
    """A line for each thing that the script has set and that would be left out.

    Args:
        model: its configuration, as the script's builder has made it.
        optimizers: the configurations of the optimizer's parts.
    """
    return [*_of_model(model), *_of_optimizers(optimizers)]


def _of_model(model: Any) -> Iterator[str]:
    for name, why in FUNCTIONS.items():
        if getattr(model, name, None) is not None:
            yield f"the model's configuration sets {name}, which is not supported with --resihp: {why}; leave it out"


def _of_optimizers(optimizers: Sequence[Any]) -> Iterator[str]:
    name = "grad_norm_skip_threshold"
    if any(math.isfinite(getattr(each, name, math.inf)) for each in optimizers):
        yield (
            f"the optimizer's configuration sets {name}, which is not supported with --resihp: "
            "workers agree on each step without it; leave it out"
        )
