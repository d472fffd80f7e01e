# SPDX-License-Identifier: Apache-2.0
"""When no plan fits: each chosen holder writes its shard, in Megatron's per-rank checkpoint format.

That format has one file per (TP rank, stage), which is just what a survivor holds, and needs no collective. When all
shards are written, `--load RUN_DIR/emergency_checkpoint --no-load-rng` goes on from the last step (contract 6).
Who holds no such shard writes the slices that it does hold (docs/usage.md).
"""

import json
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

from megatron_resihp.control.node.environment import RUN_DIR
from megatron_resihp.control.worker.saved_state import DIRECTORY
from megatron_resihp.events.training import EmergencyCheckpoint
from megatron_resihp.integration.patches.counting import count_again, restore_counters
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.extra_state import bearers_of, decoded, put_back
from megatron_resihp.integration.state.slice_state import slice_states
from megatron_resihp.integration.step.loss_scale import scale_of
from megatron_resihp.integration.step.optimizer_copy import Kept
from megatron_resihp.integration.step.optimizer_shards import own_part, whole_buffers
from megatron_resihp.plan import Coordinate
from megatron_resihp.plan.slices import cuts_of, slices_of
from megatron_resihp.protocol.messages import EmergencyCheckpointWritten
from megatron_resihp.protocol.published import EmergencyCheckpointOrder


def write_emergency_checkpoint(runtime: Runtime, order: EmergencyCheckpointOrder) -> None:
    """Write this worker's shard if it was chosen to, and report."""
    if not order.part_of(runtime.worker) or order.commit is None:
        return
    directory = Path(os.environ[RUN_DIR]) / DIRECTORY
    path = write_state(runtime, order, directory)
    last = runtime.held.writes_shard and runtime.control.channel.count("saved") == len(order.writers)
    if last and not order.missing:
        # Only when all shards are there may a later start find them.
        name_latest(directory, order.commit.iteration)
    runtime.control.event(EmergencyCheckpoint(
        iteration=order.commit.iteration, path=str(path), complete=not order.missing,
        missing=runtime.job.own.coordinates_in(order.missing),
    ))  # fmt: skip
    runtime.control.tell(EmergencyCheckpointWritten(runtime.worker))


def write_state(runtime: Runtime, order: EmergencyCheckpointOrder, directory: Path) -> Path:
    """Write what this worker holds, once it has taken the committed step; asks no other worker."""
    runtime.setup.sizes.restore()
    _count_after_step(runtime, order)
    # A broken iteration has changed it, or this worker doesn't run forward passes.
    put_back(bearers_of(runtime.held.live.model, runtime.held.shards), runtime.held.extra.current)
    if runtime.held.kept is not None:
        path = _save_parts(runtime, runtime.held.kept, order, directory)
    elif runtime.held.coordinate is None:
        path = _save_slices(runtime, order, directory)
    else:
        path = _save_shard(runtime, order, runtime.held.coordinate, directory)
    print(f"resihp: worker {runtime.worker} saved {path}", file=sys.stderr, flush=True)
    return path


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


def _save_slices(runtime: Runtime, order: EmergencyCheckpointOrder, directory: Path) -> Path:
    """What no stage and TP rank of the job's own layout has: a file of tensors, and what is in it as JSON beside it."""
    assert order.commit is not None
    tied_head = runtime.job.own.tied_head
    cuts = cuts_of((*runtime.held.shards, *order.part_of(runtime.worker)))
    wanted = slices_of(order.part_of(runtime.worker), cuts, tied_head)
    states = slice_states(runtime.held.live, runtime.held.shards, cuts, tied_head)
    tensors = {
        str(piece): {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        for piece, state in sorted(states.items())
        if piece in wanted and state
    }
    return _save_tensors(runtime, order, directory, "slices", tensors, {"cuts": cuts})


def _save_parts(runtime: Runtime, kept: Kept, order: EmergencyCheckpointOrder, directory: Path) -> Path:
    """What this worker has of a distributed optimizer, by parameter and elements: its part, the copy, buffers."""
    live = runtime.held.live
    own, copied = own_part(live) if kept.owns else {}, kept.copy.part if kept.copy is not None else {}
    part = {**own, **copied, **whole_buffers(live)}
    tensors = {
        f"{where.name}[{where.start}:{where.end}]": {name: each.detach().cpu().clone()
                                                     for name, each in entry.tensors.items()}
        for where, entry in part.items()
    }  # fmt: skip
    return _save_tensors(runtime, order, directory, "parts", tensors, {"stage_and_tp_rank": list(kept.coordinate)})


def _save_tensors(
    runtime: Runtime, order: EmergencyCheckpointOrder, directory: Path, kind: str,
    tensors: dict[str, dict[str, torch.Tensor]], more: dict[str, Any],
) -> Path:  # fmt: skip
    assert order.commit is not None
    iteration = order.commit.iteration
    path = directory / f"iter_{iteration:07d}" / f"worker_{runtime.worker}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = runtime.held.live
    counted = {"opt_param_scheduler": trained.scheduler.state_dict(), "grad_scaler": scale_of(trained.optimizer)}
    extra = {layer: {name: decoded(state) for name, state in states.items()}
             for layer, states in runtime.held.extra.current.items()}  # fmt: skip
    state = {kind: tensors, "extra_state": extra, "args": runtime.job.args, **counted}
    _replace(path, lambda aside: torch.save(state, aside))
    contents = {
        "iteration": iteration,
        "consumed_train_samples": runtime.job.args.consumed_train_samples,
        **more,
        "missing": [list(shard) for shard in order.missing],
        kind: {
            piece: {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in state.items()}
            for piece, state in tensors.items()
        },
    }
    path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n")
    return path


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
        runtime.job.args.consumed_train_samples += runtime.job.args.global_batch_size
        count_again(runtime, order.commit.outcome)
