# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_resihp.cpu SCRIPT ARGS...` runs an unmodified training script on CPUs.

May import nothing but the standard library and `megatron_resihp.cpu`.
"""

import runpy
import sys
from pathlib import Path

from megatron_resihp.cpu import install


def main() -> None:
    """Install the stand-in, then run the script just as `python SCRIPT ARGS...` would."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron_resihp.cpu SCRIPT [ARGS...]")
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
