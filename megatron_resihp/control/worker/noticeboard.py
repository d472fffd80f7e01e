# SPDX-License-Identifier: Apache-2.0
"""Where workers that have lost the coordinator tell each other something: a directory that all nodes share.

May import: the standard library.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

LOOK_S: Final = 0.25


class Noticeboard:
    """Notes by kind and worker, and one decision. A note is there as a whole or not at all.

    Args:
        directory: made if it is not there.
        me: this worker's id.
    """

    def __init__(self, directory: Path, me: int) -> None:
        self._directory = directory
        self._me = me
        directory.mkdir(parents=True, exist_ok=True)

    def pin(self, kind: str, note: dict[str, Any]) -> None:
        """Let the others read this worker's note, in place of an earlier one of that kind."""
        self._written(json.dumps(note)).replace(self._path(kind, self._me))

    def gather(self, kind: str, workers: Collection[int], timeout_s: float) -> dict[int, dict[str, Any]]:
        """The notes of these workers that come in time, and any other notes; this worker must have left its own."""
        deadline = time.monotonic() + timeout_s
        own = self._path(kind, self._me).read_text()
        while True:
            # NFS looks at a directory again once this host has changed it.
            self._written(own).replace(self._path(kind, self._me))
            found = {int(path.stem.rpartition("_")[2]): path for path in self._directory.glob(f"{kind}_*.json")}
            if found.keys() >= set(workers) or time.monotonic() >= deadline:
                return {worker: json.loads(path.read_text()) for worker, path in sorted(found.items())}
            time.sleep(LOOK_S)

    def decide(self, decision: dict[str, Any]) -> dict[str, Any]:
        """Propose a decision. The first proposal binds all; returns the binding one."""
        path, own = self._directory / "decision.json", self._written(json.dumps(decision))
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
        decided: dict[str, Any] = json.loads(path.read_text())
        return decided

    def _path(self, kind: str, worker: int) -> Path:
        return self._directory / f"{kind}_{worker}.json"

    def _written(self, text: str) -> Path:
        path = self._directory / f".{self._me}.{os.getpid()}"
        path.write_text(text)
        return path
