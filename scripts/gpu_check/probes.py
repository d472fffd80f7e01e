# SPDX-License-Identifier: Apache-2.0
"""The cost of probes per iteration on the device, measured in a separate process. Imports the standard library."""

from __future__ import annotations

import json
import subprocess
from typing import Final

from setting import REPOSITORY, Row, Setting, python

CASES: Final = {"probes": "the same work with and without them, in turns"}
MOST_PERCENT: Final = 0.5
PROGRAM: Final = """\
import json, sys
sys.path.insert(0, "benchmarks")
from probe_cost import measure_probes
print(json.dumps(measure_probes()))
"""


def run(setting: Setting, name: str) -> Row:
    done = subprocess.run(
        python("-c", PROGRAM), cwd=REPOSITORY, env=setting.environment(), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        return {"ok": False, "error": " | ".join(done.stderr.splitlines()[-3:])[-300:]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    percent = found["overhead_percent"]
    return {"ok": setting.stand_in if percent is None else percent <= MOST_PERCENT, **found}
