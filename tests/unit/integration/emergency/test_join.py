# SPDX-License-Identifier: Apache-2.0
"""Survivors' files joined to a checkpoint: each number in its place, whoever has written it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as checkpoints

from megatron_resihp.coding import encode
from megatron_resihp.control.worker.saved_state import DIRECTORY, JOINED, newest_state
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
    by_layers: bool = False, **metadata: str,
) -> None:  # fmt: skip
    degree = shard.tp_degree
    places = tuple(gated_place(part, shard.tp_rank, degree) for part in range(2))
    kinds = tuple({kind for found in ranges.values() for kind in found})
    parameter = Parameter(dtype, (ROWS, COLUMNS // degree), places, tuple(ranges), kinds)
    path = run_dir / DIRECTORY / "iter_0000007" / f"worker_{worker}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    args = SimpleNamespace(use_layer_wise_distributed_optimizer=by_layers)
    common = {"iteration": 7, "optimizer": {"param_groups": [{"step": step}]}, "args": args}
    torch.save({"tensors": {"0/fc1": ranges}, "objects": [], "metadata": metadata, "common": common}, path)
    contents = Contents(worker, "3fa8", 1, 7, 28, 1, (shard,), {"0/fc1": parameter})
    path.with_suffix(".json").write_text(json.dumps(encode(contents)))


def joined(run_dir: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that is made of them."""
    from megatron_resihp.integration.emergency.join import join

    [group] = found_groups(run_dir)
    assert group.gaps == ()
    path = join(group, run_dir / DIRECTORY / JOINED)
    assert newest_state(run_dir) == (path.parent, 7)
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, "latest_checkpointed_iteration.txt"]
    reader = checkpoints.FileSystemReader(path)
    found: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in reader.read_metadata().state_dict_metadata.items()
        if hasattr(each, "properties")
    }
    checkpoints.load(found, storage_reader=reader, no_dist=True)
    return found


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
