# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' modules are importable as where benchmarks run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
