# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py that writes down all state before and after it moves: RUN_DIR/state/WHEN-EPOCH-WORKER.pt.

What each worker holds, whatever digests say of it: parameters, masters, moments, module buffers, a distributed
optimizer's part, and the optimizer's counts of steps for each group. With files in RUN_DIR/wishes it breaks the first
epoch under a heterogeneous plan before its first forward (`break`), skips all steps under a heterogeneous plan
(`skip`), or a worker flips a bit of the first slice that it copies from its old objects or is sent (`flip-own-WORKER`,
`flip-sent-WORKER`), or of what it fills new objects of Megatron's own groups with (`flip-new-WORKER`), once.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402

from megatron_resihp.integration.loop import recovery, standby  # noqa: E402
from megatron_resihp.integration.modes import migration  # noqa: E402
from megatron_resihp.integration.modes.heterogeneous import HeterogeneousMode, HeterogeneousState  # noqa: E402
from megatron_resihp.integration.modes.shared_out import SharedOutState  # noqa: E402
from megatron_resihp.integration.modes.uniform import UniformState  # noqa: E402
from megatron_resihp.integration.probes.fault_injection import StagedError  # noqa: E402
from megatron_resihp.integration.state import slice_state  # noqa: E402
from megatron_resihp.integration.state.shard import group_steps, shard_tensors  # noqa: E402
from megatron_resihp.integration.step import optimizer_buddies, step  # noqa: E402
from megatron_resihp.integration.step.optimizer_shards import own_part  # noqa: E402
from megatron_resihp.protocol.records import Outcome  # noqa: E402

RUN_DIR, WORKER = Path(os.environ["RESIHP_RUN_DIR"]), os.environ["RESIHP_WORKER"]
WISHES, STATE = RUN_DIR / "wishes", RUN_DIR / "state"

plain_forward_step, plain_adopt = pretrain_gpt.forward_step, recovery._adopt
plain_receive, plain_fill = slice_state._receive, slice_state._Filler.fill
plain_fill_shard, plain_fill_part = migration.fill_shard, optimizer_buddies.fill_part
plain_agree = step.agree
breaking = False
receiving = flipped = False


def watched(plain_migrate: Any) -> Any:
    def migrate(state: Any, order: Any, trained: Any) -> Any:
        runtime = state._runtime
        note("left", order.epoch, runtime, runtime.held.live)
        found = plain_migrate(state, order, trained)
        note("came", order.epoch, runtime, trained)
        return found

    return migrate


def note(when: str, epoch: int, runtime: Any, trained: Any) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in shard_tensors(trained).items()}
    if runtime.job.shares_optimizer and trained.optimizer.config.use_distributed_optimizer:
        for where, entry in own_part(trained).items():
            tensors |= {f"{where}/{name}": tensor.detach().clone() for name, tensor in entry.tensors.items()}
    STATE.mkdir(exist_ok=True)
    torch.save({"tensors": tensors, "steps": group_steps(trained)}, STATE / f"{when}-{epoch}-{WORKER}.pt")


def adopt(runtime: Any, *rest: Any) -> None:
    global breaking
    plain_adopt(runtime, *rest)
    breaking = (WISHES / "break").exists() and isinstance(runtime.mode, HeterogeneousMode) and WORKER == "0"


def forward_step(*positional: Any) -> Any:
    if breaking:
        raise StagedError("this epoch is not to take a step")
    return plain_forward_step(*positional)


def agree(runtime: Any, *counted: Any) -> Outcome:
    outcome = plain_agree(runtime, *counted)
    if (WISHES / "skip").exists() and isinstance(runtime.mode, HeterogeneousMode):
        outcome = replace(outcome, grad_norm=None, skipped=True)
    return outcome


def receive(*positional: Any) -> int:
    global receiving
    receiving = True
    try:
        return plain_receive(*positional)
    finally:
        receiving = False


def fill(self: Any, pieces: Any, tensors: dict[str, torch.Tensor]) -> None:
    global flipped
    wish = WISHES / f"flip-{'sent' if receiving else 'own'}-{WORKER}"
    name = next((name for name, tensor in tensors.items() if name.startswith("param/") and tensor.numel()), None)
    if name and wish.exists() and not flipped:
        flipped = True
        tensors = spoilt(tensors, name)
    plain_fill(self, pieces, tensors)


def spoilt(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    tensor = tensors[name].detach().clone(memory_format=torch.contiguous_format)
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return {**tensors, name: tensor}


def fill_shard(trained: Any, tensors: dict[str, torch.Tensor], steps: Any) -> None:
    wished = (WISHES / f"flip-new-{WORKER}").exists()
    plain_fill_shard(trained, spoilt(tensors, next(iter(tensors))) if wished else tensors, steps)


def fill_part(trained: Any, state: dict[Any, dict[str, torch.Tensor]], steps: Any) -> None:
    if (WISHES / f"flip-new-{WORKER}").exists():
        where = next(iter(state))
        state = {**state, where: spoilt(state[where], "param")}
    plain_fill_part(trained, state, steps)


if __name__ == "__main__":
    for kind in (UniformState, SharedOutState, HeterogeneousState):
        kind.migrate = watched(kind.migrate)  # type: ignore[method-assign]
    recovery._adopt = adopt
    migration.fill_shard, optimizer_buddies.fill_part = fill_shard, fill_part
    step.agree = standby.agree = agree
    slice_state._receive, slice_state._Filler.fill = receive, fill  # type: ignore[method-assign]
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
