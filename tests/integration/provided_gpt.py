# SPDX-License-Identifier: Apache-2.0
"""fused_gpt.py as a script that gives Megatron a function to build the model with, not a configuration.

Only then Megatron 0.19 lays out the matrices that Muon shares out. It notes what noting_gpt.py does, if RUN_DIR is set.
"""

import os
import runpy

import fused_gpt  # noqa: F401 (its Adam)
from jobs import PRETRAIN
from stock_runs import NOTING

from megatron_resihp.integration import releases

if __name__ == "__main__":
    releases.Release.configures_models = False  # type: ignore[assignment, method-assign]
    runpy.run_path(str(NOTING if "RUN_DIR" in os.environ else PRETRAIN), run_name="__main__")
