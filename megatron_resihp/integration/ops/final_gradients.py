# SPDX-License-Identifier: Apache-2.0
"""Finds out when gradients are final: as the last backward op of their chunk adds to them. May import torch and `plan`.

Megatron's hooks add a micro-batch's gradient of a parameter to the sum of all. The hooks here follow them, and are
there only during that op. Where W is an op of its own, it adds gradients without hooks, and so do some layers that
predict further tokens: they are run several times in a pass. These gradients are final when the op is over.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_resihp.plan import PlannedOp


class Watched(NamedTuple):
    """A parameter that something waits for.

    Attributes:
        chunk: that it is in.
        number: of what waits for its gradient.
        hooked: whether a pass adds to its gradient once at most.
    """

    parameter: Any
    chunk: int
    number: int
    hooked: bool


class FinalGradients:
    """Those of one iteration. Tells of each number once all of its gradients are final.

    Args:
        watched: a parameter may be in it several times, and so may a number.
        ops: of this worker, in their order.
        tell: called with a number and moments in the device's work after which its gradients are final; from any
            thread.
        moment: the present one.
    """

    def __init__(
        self, watched: Iterable[Watched], ops: Sequence[PlannedOp], tell: Callable[[int, list[Any]], None],
        moment: Callable[[], Any],
    ) -> None:  # fmt: skip
        self._last = {op.chunk: op for op in ops if op.kind != "F"}
        self._tell, self._moment = tell, moment
        self._of_chunk: defaultdict[int, dict[Any, bool]] = defaultdict(dict)
        self._numbers: defaultdict[Any, set[int]] = defaultdict(set)
        self._missing: defaultdict[int, set[Any]] = defaultdict(set)
        self._moments: defaultdict[int, list[Any]] = defaultdict(list)
        for parameter, chunk, number, hooked in watched:
            self._of_chunk[chunk][parameter] = hooked
            self._numbers[parameter].add(number)
            self._missing[number].add(parameter)

    def begin(self, numbers: Iterable[int]) -> None:
        """Tell at once of numbers whose gradients no op adds to."""
        for chunk in self._of_chunk.keys() - self._last.keys():
            self._end(chunk)
        for number in numbers:
            if number not in self._missing:
                self._tell(number, [])

    @contextmanager
    def watching(self, op: PlannedOp) -> Iterator[None]:
        """Around each backward op, and each W."""
        if self._last[op.chunk] != op:
            yield
            return
        handles = []
        if op.kind == "B":
            hooked = [parameter for parameter, once in self._of_chunk[op.chunk].items() if once]
            handles = [_accumulation(parameter).register_hook(self._hook(parameter)) for parameter in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._end(op.chunk)

    def _hook(self, parameter: Any) -> Callable[..., None]:
        added = False

        def hook(*_gradients: Any) -> None:
            nonlocal added
            if added:
                raise RuntimeError("a backward pass has added to a gradient twice, whose sum may be under way")
            added = True
            self._is_final(parameter)

        return hook

    def _end(self, chunk: int) -> None:
        for parameter in self._of_chunk[chunk]:
            if parameter in self._numbers:
                self._is_final(parameter)

    def _is_final(self, parameter: Any) -> None:
        moment = self._moment()
        for number in self._numbers.pop(parameter):
            missing = self._missing[number]
            missing.discard(parameter)
            self._moments[number].append(moment)
            if not missing:
                self._tell(number, self._moments[number])


def _accumulation(parameter: Any) -> Any:
    """The node of the graph that Megatron has its own hook on; Megatron keeps it."""
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]
