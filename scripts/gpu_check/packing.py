# SPDX-License-Identifier: Apache-2.0
"""How fast gradients of slices are packed into one tensor and unpacked, against a plain copy.

Imports the plugin and torch.
"""

from __future__ import annotations

from typing import Final

import torch
from setting import Row, Setting
from timing import fastest

from megatron_resihp.executor.slice_sums import pack, unpack

CASES: Final = {"pack": "slices into one tensor", "unpack": "and back"}
LEAST_SHARE: Final = 0.8
"""Required share of a copy's bandwidth."""
WIDTH: Final = 4096
LAYERS: Final = 4
REHEARSED_WIDTH: Final = 64


def run(setting: Setting, name: str) -> Row:
    device = torch.device("cpu") if setting.stand_in else torch.device("cuda", 0)
    slices = _slices(REHEARSED_WIDTH if setting.stand_in else WIDTH, device)
    flat = pack([([each], True) for each in slices])
    target = torch.empty_like(flat)
    copied = fastest(lambda: target.copy_(flat), device)
    if name == "pack":
        seconds = fastest(lambda: pack([([each], True) for each in slices]), device)
        right = torch.equal(pack([([each], True) for each in slices]), torch.cat([s.reshape(-1) for s in slices]))
    else:
        doubled = flat * 2.0
        seconds = fastest(lambda: unpack(doubled, [[each] for each in slices]), device)
        right = torch.equal(torch.cat([each.reshape(-1) for each in slices]), doubled)
    fast = setting.stand_in or copied / seconds >= LEAST_SHARE
    rate = round(flat.nbytes / seconds / 1e9, 2)
    share = round(copied / seconds, 3)
    return {"ok": right and fast, "gb_per_s": rate, "share_of_copy": share, "slices": len(slices)}


def _slices(width: int, device: torch.device) -> list[torch.Tensor]:
    """Views into the gradients of layers that another plan cuts in two: rows of some matrices, columns of others."""
    found = []
    for _ in range(LAYERS):
        rows, columns = (torch.randn(4 * width, width, device=device) for _ in range(2))
        found += [rows[: 2 * width], columns[:, width // 2 :]]
        found += list(torch.randn(4, width, device=device))
    return found
