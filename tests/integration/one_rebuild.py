# SPDX-License-Identifier: Apache-2.0
"""Rebuilds one worker's objects in one process, between two steps: `python one_rebuild.py KIND WAY...`.

KIND: fp32 or bf16, "+parts" with Megatron's distributed optimizer. WAY: "take over"; "host": the old state is in host
memory meanwhile; "again": that was begun once before, and given up; "back": nothing is built, and the old objects are
used again; "none": there is no rebuild. For each way it prints losses and norms of the steps before and after as JSON,
and the most that was in use on the device meanwhile, as a share of the state. May import megatron and everything of
this package, but after the stand-in is in place.
"""

import functools
import gc
import json
import logging
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

os.environ["RESIHP_CPU_MEMORY"] = str(1 << 40)

from megatron_resihp import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron_resihp.executor import digest  # noqa: E402
from megatron_resihp.integration.patches.startup import wrap_ddp  # noqa: E402
from megatron_resihp.integration.state.digests import shard_digest  # noqa: E402
from megatron_resihp.integration.state.footprint import bring_gradients_back, bytes_of, free_gradients  # noqa: E402
from megatron_resihp.integration.state.host_state import move_to_host, return_to_device  # noqa: E402
from megatron_resihp.integration.state.shard import (  # noqa: E402
    fill_shard,
    group_steps,
    shard_tensors,
    with_moments_on_device,
)
from megatron_resihp.integration.state.taking_over import Succession  # noqa: E402
from megatron_resihp.integration.step.optimizer_shards import (  # noqa: E402
    digest_of,
    fill_part,
    own_part,
    publish_parameters,
)
from megatron_resihp.integration.trained import Trained  # noqa: E402
from megatron_resihp.plan import Coordinate  # noqa: E402

KIND, *WAYS = sys.argv[1:]
HALF, PARTS = KIND.startswith("bf16"), KIND.endswith("+parts")
TYPE = torch.bfloat16 if HALF else torch.float32
TOKENS, WORDS = 16, 128

own = SimpleNamespace(expert_parallel=1)
runtime: Any = SimpleNamespace(held=SimpleNamespace(succession=None), job=SimpleNamespace(own=own))


def build() -> Trained:
    config = TransformerConfig(
        num_layers=4, hidden_size=128, num_attention_heads=4, bf16=HALF, params_dtype=TYPE,
        attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model: Any = GPTModel(config, get_gpt_layer_local_spec(), WORDS, TOKENS, position_embedding_type="rope")
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=PARTS)
    chunk = DistributedDataParallel(config, wrapping, Float16Module(config, model) if HALF else model)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=HALF, params_dtype=TYPE, use_distributed_optimizer=PARTS
    )  # fmt: skip
    return Trained([chunk], get_megatron_optimizer(adam, [chunk]), None)


def step(trained: Trained, number: int) -> tuple[float, float]:
    chunk: Any = trained.model[0]
    torch.manual_seed(number)
    words, places = torch.randint(0, WORDS, (1, TOKENS)), torch.arange(TOKENS).unsqueeze(0)
    chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS), 1).bool()
    loss = chunk(words, places, mask, labels=words).float().mean()
    loss.backward()
    chunk.finish_grad_sync()
    _, norm, _ = trained.optimizer.step()
    return float(loss.detach()), float(norm)


def digest_now(trained: Trained) -> Any:
    return digest_of(own_part(trained)) if PARTS else shard_digest(trained, Coordinate(0, 0))


def fill(new: Trained, old: Trained) -> None:
    """As `migrate` does where a worker keeps its shard."""
    if not PARTS:
        tensors = shard_tensors(old)
        fill_shard(new, with_moments_on_device(tensors) if old.away else tensors, group_steps(old))
        return
    fill_part(new, {where: entry.tensors for where, entry in own_part(old).items()}, group_steps(old))
    publish_parameters(new)


def rebuild(old: Trained, way: str) -> Trained:
    """As recoveries do, and as far as *go*."""
    before = digest_now(old)
    free_gradients(old)
    if way in ("again", "back"):
        move_to_host(old)
        return_to_device(old)
    if way == "back":
        bring_gradients_back(old)
        return old
    if way != "take over":
        move_to_host(old)
    succession = runtime.held.succession = Succession(old, {0: 0} if way == "take over" else {})
    new = build()
    succession.optimizer_of(new)
    fill(new, old)
    succession.return_gradients()
    assert digest_now(new) == before, "the new objects' state is not the old one's"
    assert digest_now(old) == before, "the old objects are not whole any more"
    runtime.held.succession = None
    return new


def train(way: str) -> dict[str, Any]:
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    trained = build()
    steps = [step(trained, number) for number in range(3)]
    gc.collect()
    whole, others = bytes_of(trained), torch.cuda.memory_allocated() - bytes_of(trained)
    torch.cuda.reset_peak_memory_stats()
    if way != "none":
        trained = rebuild(trained, way)
    peak = (torch.cuda.max_memory_allocated() - max(others, 0)) / whole
    steps += [step(trained, number) for number in range(3, 6)]
    return {"steps": steps, "peak": round(peak, 3)}


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.cuda.set_device(0)
    # Digests take some hundred megabytes of a device; the model is a thousandth of a real one, and so is that here.
    digest.CHUNK >>= 10
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        DistributedDataParallel.__init__ = functools.partialmethod(  # type: ignore[method-assign, assignment]
            wrap_ddp(runtime, DistributedDataParallel.__init__)
        )
        print(json.dumps({way: train(way) for way in WAYS}))


if __name__ == "__main__":
    main()
