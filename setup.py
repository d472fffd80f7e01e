# SPDX-License-Identifier: Apache-2.0
"""Builds the package that pyproject.toml describes, and puts the scripts that a user of the wheel needs into it.

All metadata is in pyproject.toml. Imports setuptools only.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SCRIPTS = ("pretrain_gpt.py", "make_dataset.py")
"""`resihp script NAME` says where they are; a checkout has them in scripts/."""


class BuildWithScripts(build_py):
    """Copies SCRIPTS to megatron_resihp/scripts/ of the wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in SCRIPTS:
            to = Path(self.build_lib, "megatron_resihp", "scripts", name)
            self.mkpath(str(to.parent))
            self.copy_file(f"scripts/{name}", str(to))


setup(cmdclass={"build_py": BuildWithScripts})
