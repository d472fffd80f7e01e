# SPDX-License-Identifier: Apache-2.0
"""The small install: commands that need neither torch nor Megatron, and what the others say without them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.control.exit_codes import RETRY
from megatron_resihp.extras import missing
from megatron_resihp.pipeline.search import annealing

OFFLINE = ("cost", "detector", "events", "lab", "pipeline", "plan", "planner", "report", "simulator")
"""What `plan`, `simulate`, `detect` and `report` consist of."""
LEFT_OUT = ("torch", "megatron", "psutil")
Main = Callable[[list[str]], int]


class Refuse(MetaPathFinder):
    """As if nothing of LEFT_OUT were installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] in LEFT_OUT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(scope="module")
def main() -> Iterator[Main]:
    """The command, imported anew where nothing of LEFT_OUT can be."""
    names = [name for name in sys.modules if name.split(".")[0] in (*LEFT_OUT, "megatron_resihp")]
    kept = {name: sys.modules.pop(name) for name in names}
    refuse = Refuse()
    sys.meta_path.insert(0, refuse)
    try:
        yield importlib.import_module("megatron_resihp.cli").main
    finally:
        sys.meta_path.remove(refuse)
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron_resihp"]:
            del sys.modules[name]
        sys.modules.update(kept)


def test_offline_rooms_need_nothing_of_the_extra(main: Main) -> None:
    package = sys.modules["megatron_resihp"]
    modules = pkgutil.walk_packages(package.__path__, "megatron_resihp.")
    offline = [module.name for module in modules if module.name.split(".")[1] in OFFLINE]
    assert len(offline) > 100
    for name in offline:
        importlib.import_module(name)


def test_report(main: Main, synthetic_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = synthetic_run()
    run.step(4)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    assert main(["report", str(tmp_path)]) == 0
    assert "iteration 4 of 40" in capsys.readouterr().out


def test_detect(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "times.csv"
    table.write_text("iteration,seconds\n" + "".join(f"{number},{1 + number % 3 / 100}\n" for number in range(40)))
    assert main(["detect", str(table)]) == 0
    assert "40 iterations" in capsys.readouterr().out


def test_a_coordinator_waits_for_nodes(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
    options = ["--listen", listen, "--nnodes", "2", "--run-dir", str(tmp_path), "--connect-timeout", "0.1"]
    assert main(["coordinator", *options]) == RETRY
    assert f"1 worker on each of 2 nodes, which join with --coordinator {listen}" in capsys.readouterr().out


def test_simulate_names_its_experiments(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    assert "fail-stop/llama2-13b/1h" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["launch", "train.py"], ["check", "train.py"], ["inject", "clear"], ["apply", "run", "plan.json"]]
)
def test_others_name_the_extra_that_is_missing(
    main: Main, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("resihp: torch is not installed") and "pip install '.[train]'" in said
    assert said.count("\n") == 1


def test_a_script_that_enables_the_plugin_is_told(main: Main) -> None:
    with pytest.raises(SystemExit, match=r"torch and megatron-core are not installed.*'\.\[train\]'"):
        sys.modules["megatron_resihp"].enable()


def test_only_what_is_absent_is_named() -> None:
    assert missing(["torch", "megatron.core"], {"torch": "there"}.get) == missing(["megatron.core"], {}.get)
    assert missing(["torch"], lambda name: name) is None


def test_scripts_of_the_package_can_be_found(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["script", "pretrain_gpt.py"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


def test_machine_code_is_kept_outside_the_package() -> None:
    """What is left there would be importable when the package is uninstalled."""
    kept: Any = annealing._anneal
    assert not Path(kept.stats.cache_path).is_relative_to(Path(annealing.__file__).parents[1])
