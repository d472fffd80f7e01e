# SPDX-License-Identifier: Apache-2.0
"""What tests of the integration with Megatron share."""

from __future__ import annotations

import pytest
from help_texts import keep_help_texts


@pytest.fixture(scope="package", autouse=True)
def _help_texts() -> None:
    keep_help_texts()
