# SPDX-License-Identifier: Apache-2.0
"""Where workers that have lost the coordinator tell each other something: a directory that all nodes share.

May import: the standard library and `control.shared_files`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from megatron_resihp.control.shared_files import text_of, texts_in

LOOK_S: Final = 0.25
SEEN_WITHIN_S: Final = 60.0
"""A decision that another host has just made may not be seen for so long."""


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
            texts = texts_in(self._directory, f"{kind}_*.json")
            found = {int(path.stem.rpartition("_")[2]): text for path, text in texts.items()} | {self._me: own}
            if found.keys() >= set(workers) or time.monotonic() >= deadline:
                return {worker: json.loads(text) for worker, text in sorted(found.items())}
            time.sleep(LOOK_S)

    def decide(self, decision: dict[str, Any]) -> dict[str, Any]:
        """Propose a decision. The first proposal binds all; returns the binding one.

        Raises:
            TimeoutError: there is one, and it is not seen from here.
        """
        path, own = self._directory / "decision.json", self._written(json.dumps(decision))
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
        deadline = time.monotonic() + SEEN_WITHIN_S
        while (text := text_of(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not seen from here")
            time.sleep(LOOK_S)
        decided: dict[str, Any] = json.loads(text)
        return decided

    def _path(self, kind: str, worker: int) -> Path:
        return self._directory / f"{kind}_{worker}.json"

    def _written(self, text: str) -> Path:
        path = self._directory / f".{self._me}.{os.getpid()}"
        path.write_text(text)
        return path
