# SPDX-License-Identifier: Apache-2.0
"""The patches fit every release that is supported: the installed one, and the others as `signatures/` remembers them.

`python tests/unit/integration/test_releases.py` prints what the installed release's `signatures/RELEASE.json` holds.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import package_info

from megatron_resihp.config import INJECTION_POINTS
from megatron_resihp.integration import enable, releases
from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.patches.training import training_patches
from megatron_resihp.integration.probes.injection_points import injection_patches
from megatron_resihp.integration.probes.patches import probe_patches
from megatron_resihp.integration.releases import RELEASES, TRY, Release, installed, requirement, supported
from megatron_resihp.integration.streams.patches import patches_of as stream_patches
from megatron_resihp.integration.support import LACKING, TABLE
from megatron_resihp.integration.support.page import RELEASE as DAILY
from megatron_resihp.integration.tree import found, tree_of

SIGNATURES = Path(__file__).with_name("signatures")


def patches_of(release: Release) -> list[Patch]:
    """All that have a function of Megatron's as their target."""
    injections = SimpleNamespace(points=lambda: set(INJECTION_POINTS))
    job = SimpleNamespace(args=SimpleNamespace(seed=1))
    runtime: Any = SimpleNamespace(scheduled=SimpleNamespace(injections=injections), job=job)
    patches = itertools.chain(
        enable.writer_patches(),
        training_patches(runtime, release),
        probe_patches(runtime),
        injection_patches(runtime),
        stream_patches(runtime),
    )
    return [patch for patch in patches if patch.target.startswith("megatron.") and patch.parameters is not None]


def signatures_of(release: Release) -> dict[str, list[str]]:
    """The parameters that the targets have in the installed Megatron."""
    return {patch.target: list(inspect.signature(patch.present()).parameters) for patch in patches_of(release)}


def remembered(release: Release) -> dict[str, list[str]]:
    signatures: dict[str, list[str]] = json.loads((SIGNATURES / f"{release.name}.json").read_text())
    return signatures


@pytest.mark.parametrize("release", RELEASES.values(), ids=lambda release: release.name)
def test_every_patch_fits_every_release(release: Release) -> None:
    found = remembered(release)
    for patch in patches_of(release):
        assert patch.parameters is not None
        assert tuple(found[patch.target][: len(patch.parameters)]) == patch.parameters, patch.target


def test_the_installed_release_is_as_remembered() -> None:
    release = installed()
    assert release is not None
    command = f"python {Path(__file__).name} > signatures/{release.name}.json"
    assert remembered(release) == signatures_of(release), f"read what has changed, then run `{command}`"


@pytest.mark.parametrize(("version", "is_supported"), [
    ((0, 17), False), ((0, 18), True), ((0, 19), True), ((0, 20), False), ((1, 19), False),
])  # fmt: skip
def test_only_releases_that_have_been_tried_are_let_in(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], is_supported: bool
) -> None:
    monkeypatch.delenv(TRY, raising=False)
    numbers = dict(zip(("MAJOR", "MINOR", "PATCH"), (*version, 0), strict=True))
    problem = enable.version_problem(tree_of(Path("there"), numbers))
    assert (problem is None) == is_supported
    assert is_supported or "install megatron-core>=0.18,<0.20" in str(problem)


@pytest.mark.parametrize(("text", "said"), [
    ("MAJOR = 0\nMINOR = 11\nPATCH = 0\nPRE_RELEASE = 'rc0'\nraise SystemExit('not to be run')", "0.11.0rc0"),
    ("MAJOR = 'none'", "of no known version"),
    (None, "of no known version"),
])  # fmt: skip
def test_the_version_of_a_checkout_that_comes_first_and_can_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    make_tree(tmp_path, text)
    (tmp_path / "megatron" / "__init__.py").write_text("raise SystemExit('not to be run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(enable.version_problem()).startswith(f"megatron-core {said} in {tmp_path} is not supported; ")


def test_a_worker_beside_a_megatron_of_another_version_ends_with_one_line(tmp_path: Path) -> None:
    make_tree(tmp_path, "MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    command = [sys.executable, "-c", "import megatron_resihp; megatron_resihp.enable()"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"resihp: megatron-core 0.12.1 in {tmp_path} is not supported; ")


def test_the_version_of_the_installed_megatron() -> None:
    tree = found()
    assert tree is not None and tree.numbers == (package_info.MAJOR, package_info.MINOR)
    assert tree.folder / "megatron" / "core" / "package_info.py" == Path(package_info.__file__)


def test_modules_that_a_supported_megatron_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, "MAJOR = 0\nMINOR = 18\nPATCH = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours = enable.mismatch(ModuleNotFoundError("No module named 'megatron.core.new'", name="megatron.core.new"))
    assert ours.startswith(f"this Megatron (0.18.0 in {tmp_path}) is not what the patches were written for: No module")
    other = enable.mismatch(ModuleNotFoundError("No module named 'six'", name="six"))
    assert f"can't be imported: No module named 'six'; install six, or use megatron-core {supported()}" in other


def test_no_megatron_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enable, "found", lambda: None)
    said = enable.mismatch(ModuleNotFoundError("No module named 'megatron'", name="megatron"))
    assert said.startswith(f"no megatron-core can be imported: No module named 'megatron'; install {requirement()} or")


def make_tree(folder: Path, package_info: str | None) -> None:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("import no_such_module")
    if package_info is not None:
        (core / "package_info.py").write_text(package_info)


def test_tests_may_use_a_release_that_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    release = installed()
    assert release is not None
    tried = {(package_info.MAJOR, package_info.MINOR): dataclasses.replace(release, let_in=False)}
    monkeypatch.setattr(releases, "RELEASES", RELEASES | tried)
    monkeypatch.delenv(TRY, raising=False)
    assert enable.version_problem() is not None
    monkeypatch.setenv(TRY, "1")
    assert enable.version_problem() is None


def test_the_documentation_counts_what_the_tables_have(repository: Path) -> None:
    page = (repository / "docs" / "compatibility.md").read_text()
    for release in RELEASES.values():
        functions, arguments = len(remembered(release)), len(TABLE) - len(LACKING[release.name])
        let_in = "yes" if release.let_in else "no"
        row = rf"^\| {release.name} \| {release.name}\.\d+ \| {functions} \| {arguments} \| {let_in}\b"
        assert re.search(row, page, re.MULTILINE), row


def test_the_documentation_names_the_functions_that_differ(repository: Path) -> None:
    found = [remembered(release) for release in RELEASES.values()]
    targets = {target for each in found for target in each}
    unlike = {target for target in targets if any(each.get(target) != found[0].get(target) for each in found)}
    page = (repository / "docs" / "compatibility.md").read_text()
    assert set(re.findall(r"^- `(megatron\.[\w.:]+)`", page, re.MULTILINE)) == unlike


def test_the_documentation_says_what_has_run_on_releases_that_no_daily_test_runs_on(repository: Path) -> None:
    page = (repository / "docs" / "compatibility.md").read_text()
    for release in RELEASES.values():
        if release.let_in and release.name != DAILY:
            _, _, told = page.partition(f"\n## What has run on {release.name}\n")
            assert release.checkout.removeprefix("core_v") in told.partition("\n## ")[0], release.name


def test_the_first_page_names_the_releases_that_are_let_in(repository: Path) -> None:
    assert f"**Megatron-core {supported()}.**" in (repository / "README.md").read_text()


def test_the_package_asks_for_the_same_releases(repository: Path) -> None:
    assert f'"{requirement()}"' in (repository / "pyproject.toml").read_text()


if __name__ == "__main__":
    present = installed()
    assert present is not None
    rows = (f"{json.dumps(target)}: {json.dumps(taken)}" for target, taken in signatures_of(present).items())
    print("{\n" + ",\n".join(rows) + "\n}")
