# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/structure.py` counts, on a package of a few lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = '''"""A record."""
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_resihp.work import Work


@dataclass(frozen=True)
class Record:
    """Fields of a frozen record are no attributes that methods assign."""

    a: int
    b: int
    c: int
'''
WORK = '''"""Work."""
from megatron_resihp.record import Record


class Work:
    def __init__(self, heterogeneous, message: dict) -> None:
        self.record, self.other = Record(1, 2, 3), message["kind"]
        if heterogeneous is None:
            self.third = message.get("count")

    def run(self) -> None:
        self.third = [one for one in () if self.heterogeneous is not None]
'''


def test_what_is_counted(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "megatron_resihp").mkdir()
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name, text in {"__init__": '"""A package."""\n', "record": RECORD, "work": WORK}.items():
        (tmp_path / "megatron_resihp" / f"{name}.py").write_text(text)
    (tmp_path / "README.md").write_text(f"# Title\n\nThree words here. And four words there.\n\n{'long ' * 30}\n")
    found = measure(repository, tmp_path)
    assert found["modules_per_folder_max"] == 2
    assert found["attributes_per_class_max"] == 3
    assert found["methods_per_class_max"] == 2
    assert found["import_circles"] == 1, "for type checking counts too"
    assert found["mode_branches"] == 2
    assert found["untyped_messages"] == 2
    assert found["typed_share"] == 0.5
    assert found["public_docstring_share"] == 0.8
    assert found["sentence_words_median"] == 4
    assert found["doc_lines_over_120"] == 1


def measure(repository: Path, root: Path) -> dict[str, Any]:
    command = [sys.executable, str(repository / "benchmarks" / "structure.py"), "--root", str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures
