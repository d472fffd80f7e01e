"""When to act on a verdict: the ski-rental rule. Imports only the standard library.

A slow worker costs time in every iteration that it is endured; a reconfiguration costs a fixed time, and is wasted if
the slowness passes by itself. Nobody knows how long it will last. Whoever endures it until the time lost equals what
acting costs, and acts then, loses at most twice what the best decision in hindsight would have lost, and no
deterministic rule guarantees less (Karlin et al., Competitive snoopy caching, Algorithmica 3, 1988).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SkiRental:
    """The time lost to one slowness so far.

    Attributes:
        cost: seconds that acting costs.
        lost: seconds lost up to now.
    """

    cost: float
    lost: float = 0.0

    def after(self, seconds: float, healthy_seconds: float) -> "SkiRental":
        """With one more iteration that took `seconds` and would have taken `healthy_seconds`. Iterations without a
        known duration, or faster than healthy, lose nothing."""
        excess = seconds - healthy_seconds
        return SkiRental(self.cost, self.lost + excess) if excess > 0 else self

    @property
    def due(self) -> bool:
        """Whether it is time to act."""
        return self.lost >= self.cost
