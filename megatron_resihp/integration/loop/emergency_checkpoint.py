# SPDX-License-Identifier: Apache-2.0
"""When no plan fits: each chosen holder writes its shard, in Megatron's per-rank checkpoint format if that can hold it.

That format has one file per (TP rank, stage), which is just what a survivor of a uniform plan holds, and needs no
collective. When all shards are written, `--load RUN_DIR/emergency_checkpoint --no-load-rng` goes on from the last step
(contract 6). Where not all hold such a shard, or hold only a part of a distributed optimizer's state, each writes what
it holds by parameter, and `resihp emergency` makes a checkpoint of that (`integration.emergency`).
"""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import generate_state_dict, get_checkpoint_name, get_checkpoint_tracker_filename

from megatron_resihp.control import keys
from megatron_resihp.control.node.environment import RUN_DIR
from megatron_resihp.control.worker.saved_state import DIRECTORY, iteration_name
from megatron_resihp.events.training import EmergencyCheckpoint
from megatron_resihp.integration.emergency.file_of_parameters import write_parameters
from megatron_resihp.integration.modes.emergency_format import has_files_by_stage
from megatron_resihp.integration.patches.counting import (
    count_again,
    count_consumed,
    count_lost_evaluation,
    restore_counters,
)
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.extra_state import bearers_of, put_back
from megatron_resihp.plan import Coordinate
from megatron_resihp.protocol.messages import EmergencyCheckpointWritten
from megatron_resihp.protocol.published import EmergencyCheckpointOrder


def write_emergency_checkpoint(runtime: Runtime, order: EmergencyCheckpointOrder) -> None:
    """Write this worker's shard if it was chosen to, and report."""
    if not order.part_of(runtime.worker) or order.commit is None:
        return
    directory = Path(os.environ[RUN_DIR]) / DIRECTORY
    path, problem = write_state(runtime, order, directory)
    runtime.control.channel.put(f"{keys.SAVED}{runtime.worker}", "yes")
    runtime.control.event(EmergencyCheckpoint(
        iteration=order.commit.iteration, path=str(path), complete=not order.missing and not problem,
        missing=runtime.job.own.coordinates_in(order.missing),
    ))  # fmt: skip
    runtime.control.tell(EmergencyCheckpointWritten(runtime.worker))


def name_if_whole(runtime: Runtime, order: EmergencyCheckpointOrder) -> None:
    """Let later starts find the checkpoint, once all shards are there; to be called when no more is waited for.

    Each writer does it: any of them may die, and the coordinator may be replaced, while they write.
    """
    if order.commit is None or order.missing or not order.part_of(runtime.worker) or not by_stage(runtime, order):
        return
    if all(runtime.control.channel.published(f"{keys.SAVED}{worker}") for worker in order.writers):
        name_latest(Path(os.environ[RUN_DIR]) / DIRECTORY, order.commit.iteration)


def write_state(runtime: Runtime, order: EmergencyCheckpointOrder, directory: Path) -> tuple[Path, str]:
    """Write what this worker holds, once it has taken the committed step; asks no other worker.

    Returns the file, and why it can't be joined with others' files; empty: it can, or Megatron loads it as it is.
    """
    runtime.setup.sizes.restore()
    _count_after_step(runtime, order)
    # A broken iteration has changed it, or this worker doesn't run forward passes.
    put_back(bearers_of(runtime.held.live.model, runtime.held.shards), runtime.held.extra.current)
    coordinate = runtime.held.coordinate
    if by_stage(runtime, order) and coordinate is not None:
        path, problem = _save_shard(runtime, order, coordinate, directory), ""
    else:
        path, problem = _save_parameters(runtime, order, directory)
    but = f", which can't be joined with others' files: {problem}" if problem else ""
    print(f"resihp: worker {runtime.worker} saved {path}{but}", file=sys.stderr, flush=True)
    return path, problem


def by_stage(runtime: Runtime, order: EmergencyCheckpointOrder) -> bool:
    """Whether all that write have just what Megatron has in one file of a checkpoint; the same on all of them."""
    own = runtime.job.own
    whole = all(own.coordinate_of(shards) is not None for shards in order.writers.values())
    return whole and order.entire and has_files_by_stage(runtime.job)


def name_latest(directory: Path, iteration: int) -> None:
    """Let later starts find what was saved in that iteration."""
    _replace(Path(get_checkpoint_tracker_filename(str(directory))), lambda path: path.write_text(str(iteration)))


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file at once, so that a worker that is killed while it writes leaves the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write(aside)
    aside.replace(path)


def _save_shard(runtime: Runtime, order: EmergencyCheckpointOrder, coordinate: Coordinate, directory: Path) -> Path:
    assert order.commit is not None
    iteration, args = order.commit.iteration, runtime.job.args
    path = Path(
        get_checkpoint_name(
            str(directory), iteration, pipeline_parallel=args.pipeline_model_parallel_size > 1,
            tensor_rank=coordinate.tp_rank, pipeline_rank=coordinate.stage, expert_parallel=False, expert_rank=0,
        )
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    save_format, args.ckpt_format = args.ckpt_format, "torch"
    state = generate_state_dict(
        args, unwrap_model(runtime.held.live.model), runtime.held.live.optimizer, runtime.held.live.scheduler,
        [_random_states()], iteration,
    )  # fmt: skip
    args.ckpt_format = save_format
    state["num_floating_point_operations_so_far"] = runtime.tally.flops
    _replace(path, lambda aside: torch.save(state, aside))
    return path


def _save_parameters(runtime: Runtime, order: EmergencyCheckpointOrder, directory: Path) -> tuple[Path, str]:
    assert order.commit is not None
    # Another run in the same directory may have left a state of the same iteration.
    name = f"worker_{runtime.worker}-{runtime.job.run}.pt"
    path = directory / iteration_name(order.commit.iteration) / name
    return path, write_parameters(runtime, order, path, _replace)


def _random_states() -> dict[str, Any]:
    """What Megatron's get_rng_state collects, which needs process groups."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def _count_after_step(runtime: Runtime, order: EmergencyCheckpointOrder) -> None:
    """Counters as they are once the committed iteration is over."""
    assert order.commit is not None
    restore_counters(runtime, order.commit.counters)
    if order.commit.replay:
        assert order.commit.outcome is not None
        runtime.job.args.iteration = order.commit.iteration
        count_again(runtime, order.commit.outcome)
        count_consumed(runtime)
        count_lost_evaluation(runtime.job.args)
