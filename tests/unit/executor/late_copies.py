# SPDX-License-Identifier: Apache-2.0
"""A device whose copies come late: what is read or used again too early is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

UNKNOWN: Final = 77
"""The bytes of memory that nobody has written."""


class Copy:
    """Is made when it is waited for."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make: Callable[[], object] | None = make

    def synchronize(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            make()

    def query(self) -> bool:
        return self._make is None


class LateCopies:
    """Copies to the host are made when they are waited for; copies back at once, as the device's own work waits."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.given_back = 0
        self.back_is_slow = False

    def allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        return torch.full((size,), UNKNOWN, dtype=torch.uint8)

    def give_back(self) -> None:
        self.given_back += 1

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        kept = source.clone()  # the device's later work comes after the copy
        return Copy(lambda: target.copy_(kept))

    def back(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        target.copy_(source)
        copy = Copy(lambda: None)
        if not self.back_is_slow:
            copy.synchronize()
        return copy
