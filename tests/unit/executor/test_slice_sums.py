# SPDX-License-Identifier: Apache-2.0
"""Gradients summed slice by slice; groups are stood in for."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from late_copies import LateCopies

from megatron_resihp.executor import slice_sums
from megatron_resihp.executor.host_memory import HostMemory
from megatron_resihp.executor.slice_sums import Bucket, sum_gradients
from megatron_resihp.plan.slices import TIED, WHOLE, Slice


class Group:
    """Of two workers, the other of which has fives everywhere."""

    def __init__(self) -> None:
        self.summed: list[int] = []

    def sum(self, values: torch.Tensor) -> None:
        self.summed.append(values.numel())
        values += 5.0


def bucket(slices: Sequence[Slice], group: Any) -> Bucket:
    return Bucket(tuple(slices), group)


def test_a_holder_without_a_gradient_that_counts_gets_the_sum() -> None:
    counting, receiving, group = torch.ones(2, 3), torch.full((4,), 7.0), Group()
    views = {Slice(1, 0): [("weight", counting)], Slice(1, WHOLE): [("bias", receiving)]}
    sum_gradients([bucket(sorted(views), group)], views, {Slice(1, 0)})
    assert group.summed == [10]
    assert torch.equal(counting, torch.full((2, 3), 6.0)) and torch.equal(receiving, torch.full((4,), 5.0))


def test_gradients_that_a_pass_has_left_in_a_graph_are_summed_outside_of_it() -> None:
    """As where a weight's gradient is computed late: a standby sums outside of any step of Megatron's."""
    gradient = torch.ones(4, requires_grad=True) * 2.0
    first, second = gradient.split(2)
    views = {Slice(1, 0): [("first", first)], Slice(1, WHOLE): [("second", second)]}
    sum_gradients([bucket(sorted(views), Group())], views, set(views))
    assert gradient.tolist() == [7.0] * 4


def test_slices_without_parameters_are_left_out() -> None:
    """Such as what all members hold whole of an embedding without positions; it may have holders of its own."""
    group, weight = Group(), torch.ones(2)
    views = {Slice(0, WHOLE): [], Slice(1, 0): [("weight", weight)]}
    buckets = [bucket([Slice(0, WHOLE)], group), bucket([Slice(0, WHOLE), Slice(1, 0)], group)]
    sum_gradients(buckets, views, {Slice(1, 0)})
    assert group.summed == [2] and torch.equal(weight, torch.full((2,), 6.0))


def test_word_embeddings_that_are_held_twice_are_one() -> None:
    first, last = torch.ones(3), torch.full((3,), 2.0)
    views = {Slice(TIED, 0): [("weight", first), ("weight", last)]}
    sum_gradients([bucket(list(views), None)], views, set(views))
    assert torch.equal(first, torch.full((3,), 3.0)) and torch.equal(last, first)


def test_views_of_any_shape_and_type() -> None:
    """A slice may be some columns of a matrix, and gradients of half precision may stand beside others."""
    matrix, bias, group = torch.arange(12.0).view(3, 4), torch.ones(2, dtype=torch.bfloat16), Group()
    columns = matrix[:, 1:3]
    views = {Slice(1, 0): [("a", columns), ("b", bias)]}
    sum_gradients([bucket(list(views), group)], views, set(views))
    assert torch.equal(matrix[:, 1:3], torch.tensor([[6.0, 7.0], [10.0, 11.0], [14.0, 15.0]]))
    assert torch.equal(matrix[:, 0], torch.tensor([0.0, 4.0, 8.0]))
    assert torch.equal(bias, torch.full((2,), 6.0, dtype=torch.bfloat16))


def test_gradients_that_are_too_many_for_one_load_are_summed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a device's host memory; what is large is cut, and all of it is summed once."""
    monkeypatch.setattr(slice_sums, "LOAD", 40)
    group, copies = Group(), LateCopies()
    matrix, bias, other = torch.arange(24.0).view(8, 3)[:, 1:], torch.ones(3), torch.ones(2)
    expected = [each + 5.0 for each in (matrix, bias, other)]
    views = {Slice(1, 0): [("a", matrix), ("b", bias)], Slice(2, 0): [("c", other)]}
    buckets = [bucket([Slice(1, 0)], group), bucket([Slice(2, 0)], group)]
    sum_gradients(buckets, views, set(views), HostMemory(copies))
    assert group.summed == [10, 9, 2]
    for found, wanted in zip((matrix, bias, other), expected, strict=True):
        assert torch.equal(found, wanted)
    assert copies.allocated == [64, 64, 8]


def test_a_large_gradient_travels_in_pieces_whatever_its_first_dimension() -> None:
    """A matrix that tensor parallelism cuts by rows is seen as one block of them."""
    gradient = torch.ones(1, 8, 4)
    loads = list(slice_sums.loads_of([([gradient], True)], most=gradient.nbytes // 4))
    assert [copies[0].shape for load in loads for copies, _ in load] == [(1, 2, 4)] * 4


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cut", [slice(0, 8), slice(8, 24), slice(3, 19), slice(8, 13)])
@pytest.mark.parametrize("first", [0, 1])
def test_columns_keep_their_bits_on_the_way_there_and_back(kind: torch.dtype, cut: slice, first: int) -> None:
    """Also where their rows are no whole words of 16 bytes, and for numbers that are none."""
    content = bytearray(Random(0).randbytes((first + 12 * 24) * kind.itemsize))
    columns = torch.frombuffer(content, dtype=kind)[first:].view(12, 24)[:, cut]
    flat = slice_sums.pack([([columns], True)])
    assert torch.equal(bits(flat), bits(columns))
    back = torch.zeros(12, 24, dtype=kind)[:, cut]
    slice_sums.unpack(flat, [[back]])
    assert torch.equal(bits(back), bits(columns))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def test_columns_of_whole_words_are_copied_in_words_of_16_bytes() -> None:
    """As a device copies them fastest."""
    matrix = torch.zeros(12, 24)
    assert slice_sums.has_wide_rows(matrix[:, 4:12])
    assert not slice_sums.has_wide_rows(matrix[:, 4:11])
    assert not slice_sums.has_wide_rows(matrix[:, 3:11])
    assert not slice_sums.has_wide_rows(matrix.t())
    assert not slice_sums.has_wide_rows(torch.zeros(12, 22)[:, :8])
