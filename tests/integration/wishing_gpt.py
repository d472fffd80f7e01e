# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_gpt.py with a forward step that does what files in RUN_DIR/wishes ask for: ACTION-WORKER-ITERATION.

Actions: `oom` and `error` raise, `nan` spoils the output, `spoil` its gradient only, `hold` waits for the file `go_on`
or, in iteration 7, for `go_on-7`. From then on, `uncarried` lets the way between devices fail, and with `roomless` it
has no memory for what crosses. `grip` keeps the interpreter's lock, as a call does that hangs behind a dead peer's
kernel: no other thread runs. `hold` and `grip` make the file `begun-WORKER-ITERATION` first. `ACTION-degree-2` is
done in every stage of two members, and with `lasting-ACTION-degree-2` in such a stage's first iteration, whatever stage
the worker is in when it is redone.
In an iteration that Megatron runs again, `again` dies by SIGKILL.
With the wish `doubt` each loss is validated as Megatron does a spiky one: that it is rejected ends nothing.
The wish `packing` has no worker and iteration: the bounds of packed documents are written to RUN_DIR/packing_WORKER, a
line per micro-batch.
"""

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import pretrain_gpt  # noqa: E402
import torch  # noqa: E402
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine  # noqa: E402
from megatron.training import get_args  # noqa: E402

from megatron_resihp.executor.direct.peers import GlooPeers  # noqa: E402

WISHES = Path(os.environ["RESIHP_RUN_DIR"]) / "wishes"
HOLD_S = 60.0
GRIP_S = 300

plain_forward_step = pretrain_gpt.forward_step
plain_packing = pretrain_gpt.packing


def wished(action: str) -> bool:
    own = WISHES / f"{action}-{os.environ['RESIHP_WORKER']}-{get_args().curr_iteration + 1}"
    of_degree = f"{action}-degree-{get_args().tensor_model_parallel_size}"
    lasting = WISHES / f"lasting-{of_degree}"
    if lasting.exists():
        own.touch()
    return own.exists() or (WISHES / of_degree).exists()


def begun() -> Path:
    return WISHES / f"begun-{os.environ['RESIHP_WORKER']}-{get_args().curr_iteration + 1}"


def forward_step(*positional: Any, **options: Any) -> Any:
    if wished("oom"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    if wished("error"):
        raise ValueError("the user's code has a bug")
    if wished("hold"):
        begun().touch()
    deadline = time.monotonic() + HOLD_S
    going = (WISHES / "go_on", WISHES / f"go_on-{get_args().curr_iteration + 1}")
    while wished("hold") and not any(file.exists() for file in going) and time.monotonic() < deadline:
        time.sleep(0.01)
    if wished("grip"):
        ctypes.PyDLL(None).system(f"touch {begun()}; exec sleep {GRIP_S}".encode())
    if wished("uncarried"):
        GlooPeers.exchange = refuse  # type: ignore[method-assign]
    if wished("roomless"):
        GlooPeers.room = run_out  # type: ignore[method-assign]
    if wished("again") and get_rerun_state_machine().state is RerunState.RERUNNING_IN_PLACE:
        os.kill(os.getpid(), signal.SIGKILL)
    output, loss_function = plain_forward_step(*positional, **options)
    if (WISHES / "doubt").exists():
        loss_function = functools.partial(doubt, loss_function)
    if wished("spoil"):
        output.register_hook(lambda gradient: gradient * float("nan"))
    return (output * float("nan") if wished("nan") else output), loss_function


def refuse(*positional: Any) -> NoReturn:
    raise RuntimeError("no such luck")


def run_out(*positional: Any) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


def doubt(loss_function: Callable[..., Any], output: torch.Tensor) -> Any:
    """The loss, validated. Only an injected error rejects it."""
    result = loss_function(output)
    get_rerun_state_machine().validate_result(
        result=result[0], rejection_func=lambda loss: False, message="doubt", tolerance=0.0, fatal=False
    )
    return result


def packing(batch: dict[str, Any]) -> Any:
    with (WISHES.parent / f"packing_{os.environ['RESIHP_WORKER']}").open("a") as file:
        print(*batch["cu_seqlens"].flatten().tolist(), file=file)
    return plain_packing(batch)


if __name__ == "__main__":
    if (WISHES / "packing").exists():
        pretrain_gpt.packing = packing
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
