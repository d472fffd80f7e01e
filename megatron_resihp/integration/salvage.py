"""When no plan fits: each chosen holder writes its shard, in Megatron's per-rank checkpoint format.

That format has one file per (TP rank, stage), which is just what a survivor holds, and needs no collective. When all
shards are written, `--load RUN_DIR/salvage --ckpt-format torch --no-load-rng` goes on from the last step (contract 6).
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import generate_state_dict, get_checkpoint_name, get_checkpoint_tracker_filename

from megatron_resihp.control.worker import SalvageOrder
from megatron_resihp.integration.counting import restore_counters
from megatron_resihp.integration.runtime import Runtime


def salvage(runtime: Runtime, order: SalvageOrder) -> None:
    """Write this worker's shard if it was chosen to, and report."""
    if not order.shards or order.commit is None:
        return
    coordinate = runtime.coordinate
    assert runtime.trained is not None and coordinate is not None
    iteration, args = order.commit.iteration, runtime.args
    directory = Path(os.environ["RESIHP_RUN_DIR"]) / "salvage"
    path = Path(
        get_checkpoint_name(
            str(directory), iteration, pipeline_parallel=args.pipeline_model_parallel_size > 1,
            tensor_rank=coordinate.tp_rank, pipeline_rank=coordinate.stage, expert_parallel=False, expert_rank=0,
        )
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    _count_after_step(runtime, order)
    save_format, args.ckpt_format = args.ckpt_format, "torch"
    state = generate_state_dict(
        args, unwrap_model(runtime.trained.model), runtime.trained.optimizer, runtime.trained.scheduler,
        [_random_states()], iteration,
    )  # fmt: skip
    args.ckpt_format = save_format
    state["num_floating_point_operations_so_far"] = runtime.flops
    torch.save(state, path)
    if runtime.control.count("salvaged") == order.writers and not order.missing:
        # Only when all shards are there may a later start find them.
        Path(get_checkpoint_tracker_filename(str(directory))).write_text(str(iteration))
    print(f"resihp: worker {runtime.worker} saved {path}", file=sys.stderr, flush=True)
    runtime.control.event(
        "salvage", iteration=iteration, path=str(path), complete=not order.missing,
        missing=[runtime.own.coordinate_of((shard,)) for shard in order.missing],
    )
    runtime.control.tell("salvaged")


def _random_states() -> dict[str, Any]:
    """What Megatron's get_rng_state collects, which needs process groups."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def _count_after_step(runtime: Runtime, order: SalvageOrder) -> None:
    """Counters as they are once the committed iteration is over."""
    assert order.commit is not None and runtime.trained is not None
    restore_counters(runtime, order.commit.counters)
    if order.commit.replay:
        runtime.args.iteration = order.commit.iteration
        runtime.args.consumed_train_samples += runtime.args.global_batch_size
        runtime.trained.scheduler.step(increment=runtime.args.global_batch_size)
