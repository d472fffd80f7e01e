# SPDX-License-Identifier: Apache-2.0
"""How Megatron's start-up made groups, model and optimizer, to make them again. Imports this package's `world`."""

import functools
from collections.abc import Callable

from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.heterogeneous_groups import MegatronGroups, Sizes


class MegatronSetup:
    """What the patches of start-up take down. Each attribute is missing until Megatron has come that far.

    Attributes:
        build_groups: makes Megatron's groups for a uniform plan.
        groups: Megatron's table of groups.
        sizes: the job's own sizes, where Megatron looks them up.
        build_trained: makes a model and its optimizer in the groups that there are.
    """

    build_groups: functools.partial[None]
    groups: MegatronGroups
    sizes: Sizes
    build_trained: Callable[[], Trained]
