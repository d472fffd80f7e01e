# SPDX-License-Identifier: Apache-2.0
"""The documentation names what the program has, and links to what exists."""

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import megatron_resihp
from megatron_resihp.config import INJECTION_POINTS, ResihpConfig
from megatron_resihp.control.commands.launch import launch_options
from megatron_resihp.planner.strategies.registry import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "how-to", ROOT / "patches")
PATCHED_IN = ("patches/training.py", "probes/patches.py", "streams/patches.py", "enable.py", "releases.py",
              "patches/experts/uneven.py")  # fmt: skip
PAGES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.glob("*.md"))


@pytest.fixture
def usage(repository: Path) -> str:
    return (repository / "docs" / "usage.md").read_text()


def test_usage_names_every_flag_of_the_job(usage: str) -> None:
    assert not {name for name in (f"--{f.name.replace('_', '-')}" for f in fields(ResihpConfig)) if name not in usage}


def test_usage_names_every_option_of_launch(usage: str) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    launch_options.add_arguments(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    options = {option for action in shown for option in action.option_strings}
    assert options and not {option for option in options if f"`{option}" not in usage}


def test_every_point_of_an_injection_is_named(repository: Path) -> None:
    page = (repository / "docs" / "try.md").read_text()
    assert not {point for point in INJECTION_POINTS if f"`{point}`" not in page}


def test_planning_names_every_strategy(repository: Path) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (repository / "docs" / "planning.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(STRATEGIES) <= named


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(repository: Path, page: str) -> None:
    path = repository / page
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text())
    assert not [link for link in links if "://" not in link[0] and not _leads_somewhere(path, *link)]


def _leads_somewhere(page: Path, target: str, anchor: str) -> bool:
    to = page.parent / target if target else page
    return to.exists() and (not anchor or anchor in _anchors(to))


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Of a page's headings, as sites make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return frozenset(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings)


def test_links_out_of_the_site_and_pages_in_no_menu() -> None:
    """As `scripts/docs.sh`, which needs mkdocs, would say."""
    site = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(site)
    for page in site:
        targets = re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / page).read_text())
        inside = [(ROOT / "docs" / page).parent.joinpath(target).resolve() for target in targets if "://" not in target]
        assert all(target.is_relative_to(ROOT / "docs") for target in inside), page


def test_the_reference_is_what_the_code_says(load_script: Callable[[str], ModuleType]) -> None:
    written = (ROOT / "docs" / "reference.md").read_text()
    assert written == load_script("make_reference").page(), "run scripts/make_reference.py > docs/reference.md"


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == megatron_resihp.__version__


def test_every_source_names_its_license() -> None:
    sources = [
        *(ROOT / "megatron_resihp").rglob("*.py"),
        *(ROOT / "scripts").glob("*.sh"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    unnamed = [path for path in sources if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:100]]
    assert not unnamed


def test_the_design_names_patches_that_exist(repository: Path) -> None:
    """Every target in the table of replaced parts is the target of a Patch, and the other way round."""
    room = repository / "megatron_resihp" / "integration"
    source = "".join((room / name).read_text() for name in PATCHED_IN)
    patched = {target.rpartition(".")[2] for target in re.findall(r"[\w}]:([\w.]+)\"", source)}
    table = (repository / "docs" / "design.md").read_text().partition("## What is replaced")[2].partition("\n## ")[0]
    targets = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in targets for name in re.findall(r"`([\w.]+)`", cell)}
    assert {name.rpartition(".")[2] for name in named} == patched


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs" / "how-to").glob("*.md")))
def test_examples_of_how_to_pages_apply_to_the_code(repository: Path, tmp_path: Path, page: str) -> None:
    blocks = re.findall(r"^```diff\n(.*?)^```", (repository / "docs" / "how-to" / page).read_text(), re.M | re.S)
    assert blocks
    for name in {each for block in blocks for each in re.findall(r"^--- a/(.*)$", block, re.MULTILINE)}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    for block in blocks:
        done = subprocess.run(
            ["git", "apply", "--check", "--recount", "-"], cwd=tmp_path, input=block, capture_output=True, text=True,
            check=False, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
