# SPDX-License-Identifier: Apache-2.0
"""Cases that end well, hang, crash or raise, supervised as on a GPU, in a process that has no threads when it forks.

Executed by `test_gpu_check`, where `supervise` can be imported: `python supervised_cases.py OUT LIMIT_S LEFT_S NAME...`
prints what was found, by names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from setting import Setting
from supervise import Part, run_cases


def run(setting: Setting, name: str) -> dict[str, Any]:
    if name == "hangs":
        started = setting.out / "started"
        script = f"sleep 1000 & echo $! > {started}.part && mv {started}.part {started}"
        subprocess.run(["setsid", "bash", "-c", script], check=True)
        os.write(1, b"hanging now\n")
        threading.Event().wait()
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "raises":
        raise OSError("no such device")
    return {"ok": True}


def main(out: str, limit_s: str, left_s: str, *names: str) -> None:
    part = Part("tried", 1, run, names, float(limit_s), "")
    setting = Setting(False, Path(out), time.monotonic() + float(left_s))
    print(json.dumps({row["case"]: row for row in run_cases(part, names, setting, beside=len(names))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
