# SPDX-License-Identifier: Apache-2.0
"""Op orders for pipelines that help each other out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.pipeline.joint import JointProgram, simulate_joint
from megatron_resihp.pipeline.op import OpKind
from megatron_resihp.pipeline.program import ProgramError
from megatron_resihp.pipeline.schedules import one_f_one_b
from megatron_resihp.pipeline.search.rerouted import Ways, order_ops
from megatron_resihp.pipeline.simulate import simulate


def ways(device: list[list[int]], f: float = 1.0, b: float = 1.0, w: float = 1.0, live: int = 99) -> Ways:
    """Devices in the order of stages, all alike."""
    table = np.array(device)
    stage = np.array([int(np.argwhere(table == d)[0][0]) for d in range(table.max() + 1)])
    seconds = np.repeat([[f], [b], [w]], len(stage), axis=1)
    return Ways(table, stage, seconds, np.zeros((len(table) - 1, table.shape[1])), np.full(len(stage), live))


@st.composite
def random_ways(draw: st.DrawFn) -> Ways:
    stages, micro_batches, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 3))
    device = np.array(
        [[s * replicas + draw(st.integers(0, replicas - 1)) for _ in range(micro_batches)] for s in range(stages)]
    )
    seconds = st.floats(0, 4).map(lambda value: round(value, 1))
    devices = stages * replicas
    return Ways(
        device,
        np.repeat(np.arange(stages), replicas),
        np.array([[draw(seconds) for _ in range(devices)] for _ in OpKind]),
        np.array([[draw(seconds) for _ in range(micro_batches)] for _ in range(stages - 1)]).reshape(-1, micro_batches),
        np.array([draw(st.integers(1, 4)) for _ in range(devices)]),
    )


@given(random_ways())
def test_orders_are_complete_within_memory_and_end_when_they_say(given_ways: Ways) -> None:
    orders, makespan = order_ops(given_ways)
    stages, micro_batches = given_ways.device.shape
    assert sum(map(len, orders)) == 3 * stages * micro_batches
    for device, ops in enumerate(orders):
        live = np.cumsum([{OpKind.F: 1, OpKind.B: 0, OpKind.W: -1}[op.kind] for op in ops])
        assert live.max(initial=0) <= given_ways.most_live[device]
    program = JointProgram(tuple(orders), (stages - 1,) * micro_batches)
    seconds = given_ways.seconds[:, given_ways.device]
    timeline = simulate_joint(program, seconds, np.broadcast_to(given_ways.transfers, (2, stages - 1, micro_batches)))
    assert timeline.makespan == pytest.approx(makespan)


def test_rerouted_work_fits_into_the_bubbles_of_1f1b() -> None:
    four = [[s * 3 + m % 3 for m in range(12)] for s in range(4)]
    four[2] = [s if s != 6 else 7 + m // 3 % 2 for m, s in enumerate(four[2])]
    table = np.searchsorted(np.unique(four), four).tolist()
    _, makespan = order_ops(ways(table))
    usual = simulate(one_f_one_b(4, 4), np.array([1.0, 2.0, 0.0])[:, np.newaxis, np.newaxis]).makespan
    assert makespan <= usual


def test_one_micro_batch_has_to_fit() -> None:
    with pytest.raises(ProgramError, match="a device of stage 0 can't keep"):
        order_ops(ways([[0], [1]], live=0))
