# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with data sets of a class of the user's own, which don't say what they are for."""

import functools
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402

plain_provider = pretrain_gpt.datasets_provider


class OwnDataset:
    """Samples of another data set."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


@functools.wraps(plain_provider)
def datasets_provider(*positional: Any, **options: Any) -> list[OwnDataset]:
    return [OwnDataset(samples) for samples in plain_provider(*positional, **options)]


if __name__ == "__main__":
    pretrain_gpt.datasets_provider = datasets_provider
    pretrain_gpt.main()
