# SPDX-License-Identifier: Apache-2.0
"""The programs of 1F1B and interleaved 1F1B are what Megatron's own schedule functions run, op by op.

The functions run as they are, one rank after another, in this process; the model, its steps and the P2P are stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core import ModelParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.orders import group_for
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b
from megatron_resihp.plan.microbatches import can_be_grouped

Orders = tuple[tuple[Op, ...], ...]


class Group:
    """As much of a process group as the schedules look at."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Chunk(torch.nn.Module):
    """A model chunk that knows its stage."""

    def __init__(self, stage: int, config: ModelParallelConfig) -> None:
        super().__init__()
        self.stage, self.config = stage, config
        self.model_type = ModelType.encoder_or_decoder


class Peers:
    """P2P with peers that are always there. What arrives is of no interest."""

    def __init__(self, devices: int, rank: int, chunks: int, config: ModelParallelConfig) -> None:
        self.config = config
        self.pp_group = Group(devices, rank)
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        self.total_stages, self.current_stage = devices, rank
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == devices - 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        received = ("received", "received") if name.endswith("recv_forward_backward") else "received"

        def transfer(*args: Any, overlap_p2p_comm: bool = False, **kwargs: Any) -> Any:
            return (received, None) if overlap_p2p_comm else received

        return transfer


def megatron_orders(devices: int, chunks: int, micro_batches: int, group_size: int, overlap: bool) -> Orders:
    """The ops that each rank runs in Megatron's own schedule."""
    return tuple(_run_rank(devices, rank, chunks, micro_batches, group_size, overlap) for rank in range(devices))


def _run_rank(
    devices: int, rank: int, chunks: int, micro_batches: int, group_size: int, overlap: bool
) -> tuple[Op, ...]:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=devices,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=group_size,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )
    config.hidden_size = 1
    ops: list[Op] = []

    def forward_step(func: Any, data: Any, model: Chunk, *args: Any, current_microbatch: int, **kwargs: Any) -> Any:
        ops.append(Op(OpKind.F, model.stage, current_microbatch))
        return (model.stage, current_microbatch), 0

    def backward_step(input_tensor: Any, output_tensor: tuple[int, int], *args: Any) -> None:
        ops.append(Op(OpKind.B, *output_tensor))

    cpu_torch = SimpleNamespace(**{**vars(torch), "zeros": lambda *args, **kwargs: torch.zeros(*args)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "torch", cpu_torch)
        patch.setattr(schedules, "forward_step", forward_step)
        patch.setattr(schedules, "backward_step", backward_step)
        run = (
            schedules.forward_backward_pipelining_with_interleaving
            if chunks > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        run(
            forward_step_func=None,
            data_iterator=[None] * chunks,
            model=[Chunk(chunk * devices + rank, config) for chunk in range(chunks)],
            num_microbatches=micro_batches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=Peers(devices, rank, chunks, config),
            pg_collection=ProcessGroupCollection(tp=Group(), cp=Group()),
        )
    return tuple(ops)


@given(st.integers(1, 8), st.integers(1, 20))
@example(8, 3)
@example(16, 64)
def test_1f1b_is_megatrons(stages, micro_batches):
    assert one_f_one_b(stages, micro_batches).ops == megatron_orders(stages, 1, micro_batches, stages, overlap=False)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), st.booleans())
@example(4, 2, 8, 4, True)
@example(4, 2, 11, 7, True)  # a last group of 4
@example(4, 3, 4, 4, True)  # everything in the warm-up
@example(16, 4, 64, 16, True)
def test_interleaved_is_megatrons_and_refuses_the_same(devices, chunks, micro_batches, group_size, overlap):
    group_size = min(group_size, micro_batches)  # Megatron refuses more; here it means one group
    try:
        expected = megatron_orders(devices, chunks, micro_batches, group_size, overlap)
    except (ValueError, RuntimeError) as refused:
        assert "micro-batches" in str(refused)
        assert not can_be_grouped(devices, micro_batches, group_size)
        if micro_batches >= devices:
            with pytest.raises(ProgramError):
                interleaved(devices, chunks, micro_batches, group_size)
    else:
        assert interleaved(devices, chunks, micro_batches, group_size).ops == expected
        assert can_be_grouped(devices, micro_batches, group_size)


@given(st.integers(2, 6), st.integers(0, 30), st.integers(1, 20))
def test_some_group_goes_together_with_any_number_of_micro_batches(devices: int, more: int, wanted: int) -> None:
    micro_batches = devices + more
    group = group_for(devices, micro_batches, wanted)
    assert can_be_grouped(devices, micro_batches, group)
    assert group == wanted or not can_be_grouped(devices, micro_batches, wanted)
