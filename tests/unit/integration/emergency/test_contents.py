# SPDX-License-Identifier: Apache-2.0
"""What survivors' files lack, told from the descriptions beside them."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_resihp.coding import encode
from megatron_resihp.control.worker.saved_state import DIRECTORY, JOINED, SOURCE, TRACKER, Source
from megatron_resihp.integration.emergency import command
from megatron_resihp.integration.emergency.contents import (
    Contents,
    Parameter,
    Place,
    Range,
    View,
    covered,
    found_groups,
    gaps_in,
)
from megatron_resihp.plan import Shard

LAYERS = 3
"""The embedding, a decoder layer, the head."""


def place(rank: int, degree: int) -> Place:
    """A share of a matrix of 12 columns, 4 of them to each of three members."""
    columns = 12 // degree
    view = View((2, columns), (columns, 1), 0)
    return Place("layer.weight", view, (1, 2, 12), (0, 0, rank * columns), (1, 1, degree), 1, False)


def parameter(rank: int = 0, degree: int = 1, ranges: tuple[Range, ...] | None = None) -> Parameter:
    count = 24 // degree
    ranges = ((0, count),) if ranges is None else ranges
    return Parameter("float32", (2, 12 // degree), (place(rank, degree),), ranges, ("exp_avg", "param"))


def contents(worker: int, shard: Shard, of: Parameter | None = None, iteration: int = 7) -> Contents:
    parameters = {"0/weight": parameter(shard.tp_rank, shard.tp_degree) if of is None else of}
    return Contents(worker, "3fa8", 1, iteration, 28, LAYERS, (shard,), parameters)


def test_shares_of_unlike_degrees_are_all_there_is() -> None:
    """Half of the columns twice, in thirds and in halves: what is cut in sixths is whole."""
    thirds = [contents(rank, Shard(0, LAYERS, rank, 3)) for rank in range(2)]
    half = contents(5, Shard(0, LAYERS, 1, 2))
    assert gaps_in([*thirds, half]) == ()
    assert gaps_in([contents(0, Shard(0, LAYERS, 0, 1))]) == ()


def test_shards_that_no_file_has_are_named() -> None:
    assert gaps_in([contents(2, Shard(0, 2, 0, 2)), contents(3, Shard(0, LAYERS, 1, 2))]) == ("layer 2 TP rank 0 of 2",)


def test_copies_of_experts_count_as_what_their_owner_held() -> None:
    """Two workers share the experts, and one has died. What the other has a copy of is experts only."""
    own, other = (Shard(0, LAYERS, 0, 1, rank, 2) for rank in range(2))
    assert gaps_in([replace(contents(0, own), copied=(other,))]) == ()
    assert gaps_in([contents(0, own)]) == ("layers 0–2, share 1 of 2 of the experts",)
    gaps = gaps_in([replace(contents(0, Shard(1, LAYERS, 0, 1, 0, 2)), copied=(other,))])
    assert gaps == tuple(f"layer 0, share {share} of 2 of the experts" for share in range(2))


def test_a_place_in_another_expert() -> None:
    """Experts are an axis behind that of layers; or each is saved by itself."""
    stacked = Place("mlp.experts.linear_fc1.weight", View((2, 4), (4, 1), 0), (3, 8, 2, 4), (1, 5, 0, 0),
                    (3, 8, 1, 1), 2, False)  # fmt: skip
    assert stacked.of_expert(2) == stacked._replace(offset=(1, 2, 0, 0))
    single = stacked._replace(key="mlp.experts.experts.5.linear_fc1.weight", prepended=1)
    assert single.of_expert(2) == single._replace(key="mlp.experts.experts.2.linear_fc1.weight")


def test_parts_of_a_tensor_that_no_file_has_are_counted() -> None:
    """Where files claim to have all layers."""
    [gap, _] = gaps_in([contents(1, Shard(0, LAYERS, 0, 1), parameter(1, 3))])
    assert gap == "2 of 3 parts of layer.weight (exp_avg)"


@pytest.mark.parametrize(
    ("ranges", "gaps"),
    [
        ((((0, 10),), ((10, 24),)), ()),
        ((((0, 10), (8, 16)), ((16, 24),)), ()),
        ((((0, 10),), ((12, 24),)), ("2 elements of the optimizer's state of layers 0–2",)),
    ],
    ids=["side by side", "overlapping", "a gap"],
)
def test_elements_of_a_distributed_optimizer_are_counted(
    ranges: tuple[tuple[Range, ...], ...], gaps: tuple[str, ...]
) -> None:
    shard = Shard(0, LAYERS, 0, 1)
    files = [contents(worker, shard, parameter(ranges=each)) for worker, each in enumerate(ranges)]
    assert gaps_in(files) == gaps


def test_a_parameter_whose_state_nobody_has_is_missed() -> None:
    """The owner of its part has died with the copy; a standby names the parameter all the same."""
    standby = replace(parameter(ranges=()), kinds=())
    [gap] = gaps_in([contents(4, Shard(0, LAYERS, 0, 1), standby)])
    assert gap == "24 elements of the optimizer's state of layers 0–2"


def test_a_file_that_can_t_be_joined_says_why() -> None:
    odd = replace(contents(1, Shard(0, LAYERS, 0, 1)), why_not="ValueError: odd")
    assert gaps_in([odd]) == ("what worker 1 holds (ValueError: odd)",)


def test_elements_are_counted_once() -> None:
    assert covered([(4, 9), (0, 6), (5, 7)]) == 9
    assert covered([]) == 0


# ---- the command


def call(run_dir: Path) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(run_dir)]))


def write(run_dir: Path, *files: Contents) -> None:
    for each in files:
        path = run_dir / DIRECTORY / f"iter_{each.iteration:07d}" / f"worker_{each.worker}-{each.run}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.with_suffix(".json").write_text(json.dumps(encode(each)))


def test_what_is_missing_is_said_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of another iteration make up for nothing."""
    write(tmp_path, contents(2, Shard(0, 2, 0, 1)), contents(3, Shard(2, LAYERS, 0, 1), iteration=6))
    assert call(tmp_path) == command.NOTHING
    assert capsys.readouterr().err == (
        "resihp: the saved state after iteration 7 lacks: layer 2; "
        "files of other iterations, epochs or runs are never mixed with these: 6\n"
    )
    assert not (tmp_path / DIRECTORY / JOINED).exists()


@pytest.mark.parametrize("other", [{"run": "77aa"}, {"epoch": 2}], ids=["runs", "epochs"])
def test_files_of_two_runs_or_epochs_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: dict[str, Any]
) -> None:
    write(tmp_path, contents(2, Shard(0, 2, 0, 1)), replace(contents(3, Shard(2, LAYERS, 0, 1)), **other))
    assert call(tmp_path) == command.NOTHING
    assert "lacks: layer" in capsys.readouterr().err


@pytest.mark.parametrize("iteration", [7, 9])
def test_what_can_be_loaded_already_is_not_joined_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], iteration: int
) -> None:
    """Because survivors have saved it so, or it was joined before."""
    joined = tmp_path / DIRECTORY / JOINED
    write(tmp_path, contents(2, Shard(0, LAYERS, 0, 1)))
    joined.mkdir()
    (joined / TRACKER).write_text(str(iteration))
    assert call(tmp_path) == 0
    assert capsys.readouterr().out == f"the state after iteration {iteration} can be loaded with --load {joined}\n"


def test_what_can_be_loaded_is_named_beside_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joined = tmp_path / DIRECTORY / JOINED
    write(tmp_path, contents(2, Shard(0, 2, 0, 1)))
    joined.mkdir()
    (joined / TRACKER).write_text("5")
    assert call(tmp_path) == 0
    said = capsys.readouterr()
    assert said.out == f"the state after iteration 5 can be loaded with --load {joined}\n"
    assert "the saved state after iteration 7 lacks: layer 2" in said.err


def test_the_run_that_has_saved_an_iteration_last_comes_first(tmp_path: Path) -> None:
    """Whatever their names. Files of older versions say no time, so their own times count."""
    whole, apart = Shard(0, LAYERS, 0, 1), 1_000_000.0
    write(tmp_path, replace(contents(0, whole), run="a", saved_at=apart + 1), replace(contents(0, whole), run="c"),
          replace(contents(0, whole), run="b", saved_at=apart + 3))  # fmt: skip
    for written in (tmp_path / DIRECTORY).glob("iter_*/*-c.json"):
        os.utime(written, (apart + 2, apart + 2))
    assert [group.source.run for group in found_groups(tmp_path)] == ["b", "c", "a"]


def test_clocks_of_nodes_do_not_make_an_earlier_epoch_the_last(tmp_path: Path) -> None:
    whole = contents(0, Shard(0, LAYERS, 0, 1))
    write(tmp_path, replace(whole, epoch=2, saved_at=10.0), replace(whole, worker=1, epoch=1, saved_at=11.0))
    assert [group.source.epoch for group in found_groups(tmp_path)] == [2, 1]


def test_a_state_that_is_not_the_last_run_s_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run got further, and its state has been joined."""
    first = replace(contents(2, Shard(0, LAYERS, 0, 1), iteration=9), saved_at=100.0)
    write(tmp_path, first, replace(first, run="77aa", iteration=7, saved_at=200.0))
    joined = tmp_path / DIRECTORY / JOINED
    (joined / "iter_0000009").mkdir(parents=True)
    (joined / TRACKER).write_text("9")
    (joined / "iter_0000009" / SOURCE).write_text(json.dumps(encode(Source(100.0, "3fa8", 1))))
    assert call(tmp_path) == 0
    assert capsys.readouterr().out == (
        f"the state after iteration 9 can be loaded with --load {joined}\n"
        "this state is of run 3fa8; run 77aa has saved later, after iteration 7\n"
    )


def test_a_directory_without_a_saved_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path) == command.NOTHING
    assert "holds nothing that survivors have saved whole" in capsys.readouterr().err
