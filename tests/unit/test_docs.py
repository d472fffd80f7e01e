"""The documentation names what the program has, and links to what exists."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_resihp.config import DRILL_POINTS, ResihpConfig
from megatron_resihp.control import launch_options
from megatron_resihp.planner.strategies.registry import STRATEGIES

DOCUMENTS = ["usage", "design", "planning", "benchmarks"]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in DOCUMENTS), "patches/README.md"]


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


def test_usage_names_every_point_of_a_drill(usage: str) -> None:
    assert not {point for point in DRILL_POINTS if f"`{point}`" not in usage}


def test_planning_names_every_strategy(repository: Path) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (repository / "docs" / "planning.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert set(STRATEGIES) <= named


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(repository: Path, page: str) -> None:
    path = repository / page
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    assert not [target for target in targets if "://" not in target and not (path.parent / target).exists()]


def test_the_design_names_patches_that_exist(repository: Path) -> None:
    """Every target in the table of replaced parts is the target of a Patch, and the other way round."""
    room = repository / "megatron_resihp" / "integration"
    source = "".join((room / name).read_text() for name in ("seams.py", "probe_seams.py", "enable.py"))
    patched = {target.rpartition(".")[2] for target in re.findall(r"[\w}]:([\w.]+)\"", source)}
    table = (repository / "docs" / "design.md").read_text().partition("## What is replaced")[2].partition("\n## ")[0]
    targets = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in targets for name in re.findall(r"`([\w.]+)`", cell)}
    assert {name.rpartition(".")[2] for name in named} == patched
