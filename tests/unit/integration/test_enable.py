# SPDX-License-Identifier: Apache-2.0
"""patches/: they apply to the files that they were made for, and put their line before anything of Megatron."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

LINE = "import megatron_resihp; megatron_resihp.enable()"
# Only what counts of the head of pretrain_gpt.py, tag core_v0.19.0, by line number; all other lines are left empty.
HEAD = {
    4: "import time",
    8: "import json",
    11: "import os",
    23: "",
    24: "import torch",
    26: "from gpt_builders import gpt_builder",
    27: "from megatron.core import mpu",
}

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("".join(HEAD.get(number, "") + "\n" for number in range(1, max(HEAD) + 1)))
    return path


def apply(script: Path, repository: Path, *options: str) -> None:
    patch = repository / "patches" / "pretrain_gpt.diff"
    subprocess.run(["git", "apply", "--unidiff-zero", *options, patch], cwd=script.parent, check=True)


def modules_imported(script: Path) -> list[str]:
    body = ast.parse(script.read_text()).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]


def test_one_line_is_added_before_megatron_is_imported(script: Path, repository: Path) -> None:
    before = script.read_text().splitlines()
    apply(script, repository)
    after = script.read_text().splitlines()
    assert after[after.index(LINE) + 1] == "import torch"
    after.remove(LINE)
    assert after == before
    order = ["time", "json", "os", "megatron_resihp", "torch", "gpt_builders", "megatron.core"]
    assert modules_imported(script) == order


def test_the_patch_can_be_undone(script: Path, repository: Path) -> None:
    before = script.read_text()
    apply(script, repository)
    apply(script, repository, "-R")
    assert script.read_text() == before


def test_the_patch_quotes_nothing_of_megatron(repository: Path) -> None:
    text = (repository / "patches" / "pretrain_gpt.diff").read_text()
    body = text.splitlines()[text.splitlines().index("+++ b/pretrain_gpt.py") + 1 :]
    assert body == ["@@ -23,0 +24 @@", f"+{LINE}"]
