# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer: parameters, work and activations, and how tensor-parallel members share them.

Imports only the standard library.
"""

from dataclasses import dataclass
from fractions import Fraction


class ShardError(ValueError):
    """Tensor-parallel members cannot share a layer; the message names the units that are too few."""


@dataclass(frozen=True)
class Part:
    """A piece of a layer whose parameters, work and activations are shared in the same way.

    Every amount is for the whole part. FLOPs are those of the forward pass; a multiply-add is two, and attention counts
    only the half of the scores that a causal mask leaves (as Megatron does).

    Attributes:
        name: what `units` counts, for messages.
        units: indivisible pieces that go to one tensor-parallel member each: query groups, MLP columns, rows of the
            vocabulary. 0 if every member has the whole part.
        halves: pieces into which units can be cut if there are more members than units; 0 if none. These are query
            heads: each member's result for its part of a group's weights is gathered.
        parameters: number of parameters.
        weight_flops: per token, in products with weights. The backward has two such products: the gradient of the input
            (B) and that of the weights (W).
        token_flops: per token, without weights. Their backward takes twice as long and is all B.
        square_flops: per token² of a document (Σ l²), without weights.
        token_bytes: activations that are kept from F to B, per token.
        square_bytes: the same per token² of a document; selective recomputation does not keep them.
        experts: number of routed experts, which expert-parallel workers also share; 0: the part is none.
        exchanged_bytes: per token. Of experts, the copies of it that go to them, and as much comes back. Of attention,
            its key and value, which workers that share a sequence pass on.
        copy: whether the parameters are those of another layer (tied embeddings); a stage that holds that layer too
            needs no copy.
    """

    name: str
    units: int = 0
    halves: int = 0
    parameters: int = 0
    weight_flops: float = 0.0
    token_flops: float = 0.0
    square_flops: float = 0.0
    token_bytes: float = 0.0
    square_bytes: float = 0.0
    experts: int = 0
    exchanged_bytes: float = 0.0
    copy: bool = False

    def share(self, degree: int, rank: int) -> Fraction:
        """A tensor-parallel member's share of the whole: members differ by at most one unit, larger shares first.

        Raises:
            ShardError: there are fewer units than members, or there is no such member.
        """
        if not 0 <= rank < degree:
            raise ShardError(f"there is no TP rank {rank} of {degree}")
        if not self.units:
            return Fraction(1)
        if degree <= self.units:
            return Fraction(self.units // degree + (rank < self.units % degree), self.units)
        if degree % self.units == 0 and self.halves and self.halves % degree == 0:
            return Fraction(1, degree)
        raise ShardError(f"{degree} TP members can't share {self.units} {self.name}")

    def uneven(self, degree: int) -> bool:
        """Whether members of a group of this degree would hold unequal shares."""
        return bool(self.units) and degree <= self.units and self.units % degree != 0
