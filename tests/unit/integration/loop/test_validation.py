# SPDX-License-Identifier: Apache-2.0
"""Links are measured as training sends on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_resihp.integration.loop import validation
from megatron_resihp.protocol.notices import Transfer


@pytest.mark.parametrize(("batched", "posted"), [(True, ["batch isend", "batch irecv"]), (False, ["isend", "irecv"])])
def test_a_transfer_needs_no_communicator_that_training_has_not(
    monkeypatch: pytest.MonkeyPatch, batched: bool, posted: list[str]
) -> None:
    """With NCCL, a batch goes by one that all members of the group make. Only the two ends of a link are here."""
    seen: list[str] = []
    done = SimpleNamespace(wait=lambda: None)

    def post(name: str) -> Any:
        def call(tensor: Any, rank: int, group: Any) -> Any:
            seen.append(name)
            return done

        return call

    isend, irecv = post("isend"), post("irecv")
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, rank, group: "isend" if op is isend else "irecv")
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [seen.append(f"batch {ops[0]}") or done])
    on_host = SimpleNamespace(
        zeros=lambda size, **options: torch.zeros(size), float32=torch.float32,
        cuda=SimpleNamespace(synchronize=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(validation, "torch", on_host)
    runtime: Any = SimpleNamespace(
        worker=5, view=SimpleNamespace(rank_order=[4, 5]), mode=SimpleNamespace(link_group="link"),
        held=SimpleNamespace(live=SimpleNamespace(model=[SimpleNamespace(config=SimpleNamespace(batch_p2p_comm=batched))])),
    )  # fmt: skip
    found = validation._time_transfer(runtime, Transfer(sender=5, receiver=4, size=64, repeats=1))
    assert seen == posted and found["peer"] == 4
