# SPDX-License-Identifier: Apache-2.0
"""What a script may set in Megatron's configurations and models besides flags, and a job with --resihp would not heed.

Pure; imports the standard library only.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

FUNCTIONS: Final = {
    "moe_grad_scale_func": "losses of experts would be weighed otherwise where replicas have unequal shares",
    "mtp_grad_scale_func": "losses of predictions would be weighed otherwise where replicas have unequal shares",
    "finalize_model_grads_func": "heterogeneous plans sum gradients themselves",
    "no_sync_func": "heterogeneous plans sum gradients themselves",
}
"""Of the model's configuration, and why each can't be called."""
PER_TOKEN: Final = "calculate_per_token_loss"


def unheeded(model: Any, optimizers: Sequence[Any], per_token: bool, parameters: Mapping[str, Any]) -> list[str]:
    """A line for each thing that the script has set and that would be left out.

    Args:
        model: its configuration, as the script's builder has made it.
        optimizers: the configurations of the optimizer's parts.
        per_token: Megatron's argument `calculate_per_token_loss`.
        parameters: of the model, by name.
    """
    return [*_of_model(model, per_token), *_of_optimizers(optimizers), *_of_parameters(parameters)]


def _of_model(model: Any, per_token: bool) -> Iterator[str]:
    if getattr(model, PER_TOKEN, per_token) != per_token:
        yield (
            f"the model's configuration sets {PER_TOKEN}, and the arguments by which --resihp weighs losses don't; "
            "give --calculate-per-token-loss, or leave out both"
        )
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


def _of_parameters(parameters: Mapping[str, Any]) -> Iterator[str]:
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        yield (
            f"the script freezes {frozen[0]}{more}, which is not supported with --resihp: "
            "workers that come later would not have what is not trained; train all parameters"
        )
