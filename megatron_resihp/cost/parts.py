# SPDX-License-Identifier: Apache-2.0
"""What a layer is made of: parameters, work and activations, and how tensor-parallel members share them out.

Imports only the standard library.
"""

from dataclasses import dataclass
from fractions import Fraction


class ShardError(ValueError):
    """Tensor-parallel members can't share a layer; the message names what there is too little of."""


@dataclass(frozen=True)
class Part:
    """A piece of a layer whose parameters, work and activations are shared out in the same way.

    Every amount is of the whole part. FLOPs are those of the forward pass; a multiply-add is two, and attention counts
    the half of the scores that a causal mask leaves (as Megatron does).

    Attributes:
        name: what `units` counts, for messages.
        units: indivisible pieces that go to a tensor-parallel member as a whole: query groups, MLP columns, rows of the
            vocabulary. 0: every member has all of it.
        halves: pieces into which units can be cut where there are more members than units (query heads: what each
            member makes with its part of a group's weights is gathered); 0: none.
        parameters: how many.
        weight_flops: per token, in products with weights. The backward has two such products: the gradient of the
            input (B) and that of the weights (W).
        token_flops: per token, without weights. Their backward, twice as long, is all B.
        square_flops: per token² of a document (Σ l²), without weights.
        token_bytes: activations that are kept from F to B, per token.
        square_bytes: the same per token² of a document; what selective recomputation doesn't keep.
        experts: whether these are routed experts, which expert-parallel workers share out besides.
        copy: whether the parameters are those of another layer (tied embeddings), so that a stage which holds that
            layer too needs no copy.
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
    experts: bool = False
    copy: bool = False

    def share(self, degree: int, rank: int) -> Fraction:
        """The part of the whole that a tensor-parallel member holds: members differ by one unit at most, larger first.

        Raises:
            ShardError: there are fewer units than members, or no such member.
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
        """Whether members of a group of this degree would hold unlike shares."""
        return bool(self.units) and degree <= self.units and self.units % degree != 0
