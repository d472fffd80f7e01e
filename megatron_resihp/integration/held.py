# SPDX-License-Identifier: Apache-2.0
"""What this worker holds of the model and of the optimizer's state. May import `plan` and modules of
this package that know no runtime."""

import sys

from megatron_resihp.integration.state.extra_state import ExtraState
from megatron_resihp.integration.state.taking_over import Succession
from megatron_resihp.integration.step.optimizer_copy import ExpertCopy, Kept, PartCopy
from megatron_resihp.integration.trained import Trained
from megatron_resihp.integration.world.own_layers import OwnLayout
from megatron_resihp.plan import Coordinate, Shard


class Held:
    """The state that is current on this worker.

    Attributes:
        live: the training objects; pretrain's own references stay valid, recovery fills them anew. Missing until
            Megatron has built them.
        shards: those whose state `live` is.
        kept: with the distributed optimizer, what of its state is current here.
        experts: without it, the copy of another worker's experts that is kept here.
        extra: modules' extra state.
        succession: of new objects that are being built; None: of none.
    """

    live: Trained

    def __init__(self, own: OwnLayout) -> None:
        self._own = own
        self.shards: tuple[Shard, ...] = ()
        self.kept: Kept | None = None
        self.experts: ExpertCopy | None = None
        self.extra = ExtraState()
        self.succession: Succession | None = None

    @property
    def is_built(self) -> bool:
        """Whether there are training objects."""
        return hasattr(self, "live")

    @property
    def copy(self) -> PartCopy | None:
        """What is kept here of another worker's state, either way."""
        if self.experts is not None:
            return self.experts.copy
        return None if self.kept is None else self.kept.copy

    def drop_failed_copy(self) -> None:
        """Have a copy of experts that could not take a step be none: what else is held is whole."""
        if self.experts is None:
            return
        try:
            _ = self.experts.copy.part
        except Exception as error:
            owner = self.experts.copy.owner
            print(f"resihp: the copy of worker {owner}'s experts is lost: {error}", file=sys.stderr, flush=True)
            self.experts = None

    @property
    def copied(self) -> tuple[Shard, ...]:
        """What that worker holds."""
        kept = self.experts or self.kept
        return () if kept is None else kept.copied

    @property
    def coordinate(self) -> Coordinate | None:
        """The coordinate of the job's own layout whose state this is; None if it is of another layout."""
        return self._own.coordinate_of(self.shards)
