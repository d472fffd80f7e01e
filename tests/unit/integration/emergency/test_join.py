# SPDX-License-Identifier: Apache-2.0
"""Survivors' files joined to a checkpoint: each number in its place, whoever has written it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as checkpoints

from megatron_resihp.coding import encode
from megatron_resihp.control.worker.saved_state import DIRECTORY, JOINED, Source, newest_state, source_of
from megatron_resihp.integration.emergency import command
from megatron_resihp.integration.emergency.contents import Contents, Parameter, Place, Range, View, found_groups
from megatron_resihp.plan import Shard

ROWS, COLUMNS = 4, 12
SHARED = {"distrib_optim_sharding_type": "fully_reshardable"}

Kinds = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def stand_in() -> None:
    from megatron_resihp import cpu

    cpu.install(force=True)


def whole(kind: str) -> torch.Tensor:
    """Every number another one, with more digits than 16 bits have."""
    start = 1000.0 * ["param", "master", "exp_avg"].index(kind)
    return (start + torch.arange(ROWS * COLUMNS) + 1 / 3).reshape(ROWS, COLUMNS)


def gated_place(part: int, rank: int, degree: int) -> Place:
    """As of a gated weight: the upper rows of a member are one tensor's, the lower ones another one's."""
    columns = COLUMNS // degree
    view = View((ROWS // 2, columns), (columns, 1), part * ROWS // 2 * columns)
    return Place(f"fc1.{part}", view, (1, ROWS // 2, COLUMNS), (0, 0, rank * columns), (1, 1, degree), 1, False)


def save(
    run_dir: Path, worker: int, shard: Shard, dtype: str, ranges: dict[Range, Kinds], step: int = 7,
    by_layers: bool = False, run: str = "3fa8", saved_at: float = 0.0, **metadata: str,
) -> None:  # fmt: skip
    degree = shard.tp_degree
    places = tuple(gated_place(part, shard.tp_rank, degree) for part in range(2))
    kinds = tuple({kind for found in ranges.values() for kind in found})
    parameter = Parameter(dtype, (ROWS, COLUMNS // degree), places, tuple(ranges), kinds)
    path = run_dir / DIRECTORY / "iter_0000007" / f"worker_{worker}-{run}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    args = SimpleNamespace(use_layer_wise_distributed_optimizer=by_layers)
    common = {"iteration": 7, "optimizer": {"param_groups": [{"step": step}]}, "args": args}
    torch.save({"tensors": {"0/fc1": ranges}, "objects": [], "metadata": metadata, "common": common}, path)
    contents = Contents(worker, run, 1, 7, 28, 1, (shard,), {"0/fc1": parameter}, saved_at=saved_at)
    path.with_suffix(".json").write_text(json.dumps(encode(contents)))


def joined(run_dir: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that is made of them."""
    from megatron_resihp.integration.emergency.join import join

    group, *_ = found_groups(run_dir)
    assert group.gaps == ()
    path = join(group, run_dir / DIRECTORY / JOINED)
    assert newest_state(run_dir) == (path.parent, 7)
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, "latest_checkpointed_iteration.txt"]
    return read(path)


def read(path: Path) -> dict[str, torch.Tensor]:
    reader = checkpoints.FileSystemReader(path)
    found: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if hasattr(each, "properties")
    }
    checkpoints.load(found, storage_reader=reader, no_dist=True)
    return found


def call(run_dir: Path) -> int:
    """`resihp emergency`."""
    return command.run(argparse.Namespace(run_dir=run_dir))


def check(found: dict[str, torch.Tensor], prefix: str, expected: torch.Tensor) -> None:
    for part in range(2):
        assert torch.equal(found[f"{prefix}fc1.{part}"][0], expected.chunk(2)[part]), prefix


def test_members_of_unlike_stages_have_parts_of_one_tensor(tmp_path: Path) -> None:
    """A third of the columns twice, and the same number of each kind of tensor."""
    for worker, (rank, degree) in enumerate([(0, 3), (1, 2), (1, 3)]):
        kinds = {kind: whole(kind).chunk(degree, 1)[rank].flatten() for kind in ("param", "exp_avg")}
        save(tmp_path, worker, Shard(0, 1, rank, degree), "float32", {(0, ROWS * COLUMNS // degree): kinds})
    found = joined(tmp_path)
    check(found, "", whole("param"))
    check(found, "optimizer.state.exp_avg.", whole("exp_avg"))
    assert len(found) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranges_of_a_distributed_optimizer_are_put_together(tmp_path: Path, dtype: str) -> None:
    """Over the border of the two tensors, and some elements twice; parameters are the masters, rounded."""
    for worker, ranges in enumerate([[(0, 10)], [(7, 30), (30, 48)]]):
        parts = {each: {kind: whole(kind).flatten()[slice(*each)] for kind in ("master", "exp_avg")} for each in ranges}
        save(tmp_path, worker, Shard(0, 1, 0, 1), dtype, parts, **SHARED)
    found = joined(tmp_path)
    check(found, "", whole("master").to(getattr(torch, dtype)))
    check(found, "optimizer.state.param.", whole("master"))
    check(found, "optimizer.state.exp_avg.", whole("exp_avg"))
    assert len(found) == 6


def test_steps_are_counted_by_a_worker_that_has_taken_them(tmp_path: Path) -> None:
    """A standby without a part of the distributed optimizer's state has other tensors, and has counted none."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    save(tmp_path, 10, Shard(0, 1, 0, 1), "float32", {(0, 48): {"param": whole("param").flatten()}}, step=0)
    kinds = {kind: whole(kind).flatten() for kind in ("master", "exp_avg")}
    save(tmp_path, 2, Shard(0, 1, 0, 1), "float32", {(0, 48): kinds}, **SHARED)
    joined(tmp_path)
    [path] = (tmp_path / DIRECTORY / JOINED).glob("iter_*")
    assert load_common_state_dict(str(path))["optimizer"]["param_groups"][0]["step"] == 7


@pytest.mark.parametrize(
    ("metadata", "by_layers", "keys"),
    [({}, False, {"fp32_param"}), (SHARED, False, {"param"}), (SHARED, True, {"param", "fp32_param"})],
    ids=["whole", "distributed", "by layers"],
)
def test_masters_are_where_the_job_s_optimizers_look(
    tmp_path: Path, metadata: dict[str, str], by_layers: bool, keys: set[str]
) -> None:
    kinds = {kind: whole(kind).flatten() for kind in ("param", "master", "exp_avg")}
    elements = {(0, ROWS * COLUMNS): kinds}
    save(tmp_path, 0, Shard(0, 1, 0, 1), "float32", elements, by_layers=by_layers, **metadata)
    found = joined(tmp_path)
    assert {key.split(".")[2] for key in found if key.startswith("optimizer.state.")} == keys | {"exp_avg"}
    for key in keys:
        check(found, f"optimizer.state.{key}.", whole("master"))


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    """Here a file that is no longer what the description says."""
    from megatron_resihp.integration.emergency.join import join

    save(tmp_path, 0, Shard(0, 1, 0, 1), "float32", {(0, 48): {"param": whole("param").flatten()}})
    [group] = found_groups(tmp_path)
    [path] = group.files
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RuntimeError):
        join(group, tmp_path / DIRECTORY / JOINED)
    assert not list((tmp_path / DIRECTORY / JOINED).iterdir())
    assert call(tmp_path) == command.CANT_JOIN, "a start without it would train iterations again"


def test_a_run_that_has_repeated_an_iteration_replaces_what_an_earlier_one_had_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was started from an older checkpoint, in the same run directory. Its name sorts before the other's."""
    for run, saved_at, kind in (("77aa", 100.0, "exp_avg"), ("3fa8", 200.0, "param")):
        kinds = {"param": whole(kind).flatten(), "exp_avg": whole("exp_avg").flatten()}
        save(tmp_path, 0, Shard(0, 1, 0, 1), "float32", {(0, 48): kinds}, run=run, saved_at=saved_at)
        assert call(tmp_path) == 0
        check(read(tmp_path / DIRECTORY / JOINED / "iter_0000007"), "", whole(kind))
        found = newest_state(tmp_path)
        assert found is not None and source_of(*found) == Source(saved_at, run, 1)
    assert "has saved later" not in capsys.readouterr().out
    before = found[0].stat().st_mtime_ns
    assert call(tmp_path) == 0 and found[0].stat().st_mtime_ns == before, "it is not joined again"


def test_a_start_finds_nothing_while_a_joined_state_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may be killed at any time; called again, it joins what it was about to."""
    kinds = {kind: whole(kind).flatten() for kind in ("param", "exp_avg")}
    save(tmp_path, 0, Shard(0, 1, 0, 1), "float32", {(0, 48): kinds}, run="77aa", saved_at=100.0)
    assert call(tmp_path) == 0
    save(tmp_path, 0, Shard(0, 1, 0, 1), "float32", {(0, 48): kinds}, run="3fa8", saved_at=200.0)
    rename, left = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        if left:
            assert newest_state(tmp_path) is None
            raise KeyboardInterrupt
        left.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        call(tmp_path)
    assert call(tmp_path) == 0
    found = newest_state(tmp_path)
    assert found is not None and source_of(*found).run == "3fa8"
