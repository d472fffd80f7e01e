# SPDX-License-Identifier: Apache-2.0
"""Digests: equal state gives equal ones on all holders, and any other state another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.executor import digest
from megatron_resihp.executor.digest import digest_tensors

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]


def test_the_same_bits_in_another_layout() -> None:
    torch.manual_seed(1)
    values = torch.randn(6, 4)
    base = digest_tensors({"weight": values, "bias": values[0]})
    assert digest_tensors({"bias": values[0].clone(), "weight": values.t().contiguous().t()}) == base
    assert digest_tensors({"weight": torch.nn.Parameter(values), "bias": values[0]}) == base
    assert len(base) == 16 and int(base, 16) >= 0


def test_names_shapes_and_types_count() -> None:
    zeros = torch.zeros(4, dtype=torch.float32)
    states: list[dict[str, torch.Tensor]] = [
        {}, {"a": zeros}, {"b": zeros}, {"a": zeros.view(2, 2)}, {"a": zeros.to(torch.int32)}, {"a": zeros[:3]},
        {"a": zeros, "b": zeros}, {"a": zeros[:0]}, {"a": zeros[0]},
    ]  # fmt: skip
    assert len({digest_tensors(state) for state in states}) == len(states)


def test_contents_do_not_pass_from_one_tensor_to_another() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest_tensors({"a": one, "b": two}) != digest_tensors({"a": two, "b": one})


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_type_of_state(kind: torch.dtype) -> None:
    tensor = torch.zeros(8, dtype=kind)
    base = digest_tensors({"a": tensor})
    assert digest_tensors({"a": tensor.clone()}) == base
    tensor[5] = 1
    assert digest_tensors({"a": tensor}) != base


@given(size=st.integers(1, 40), data=st.data())
def test_one_flipped_bit_shows(size: int, data: st.DataObject) -> None:
    words = torch.tensor(data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size)))
    words = words.to(torch.int32)
    base = digest_tensors({"a": words.view(torch.float32)})
    where, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    words[where] ^= torch.tensor(1 << bit).to(torch.int32)
    assert digest_tensors({"a": words.view(torch.float32)}) != base


@given(words=st.lists(st.integers(-4, 4), min_size=2, max_size=6), other=st.lists(st.integers(-4, 4), min_size=2))
def test_small_differences_in_several_words_do_not_cancel(words: list[int], other: list[int]) -> None:
    """As when replicas drift apart by a last bit here and there."""
    size = min(len(words), len(other))
    states = [torch.tensor(values[:size], dtype=torch.int32) for values in (words, other)]
    same = torch.equal(*states)
    assert (digest_tensors({"a": states[0]}) == digest_tensors({"a": states[1]})) == same


def test_drift_of_one_word_up_and_another_down() -> None:
    """A sum with the positions as weights would miss the first two."""
    rows = [[3, 0, 7], [0, 1, 7], [3, 7, 0], [0, 3, 7]]
    assert len({digest_tensors({"a": torch.tensor(row, dtype=torch.int32)}) for row in rows}) == len(rows)


def test_order_counts_beyond_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 4)
    values = torch.arange(12)
    swapped = torch.cat([values[4:8], values[:4], values[8:]])
    assert digest_tensors({"a": values}) != digest_tensors({"a": swapped})


def test_not_a_number_equals_itself() -> None:
    state = {"a": torch.tensor([float("nan"), -0.0])}
    assert digest_tensors(state) == digest_tensors({"a": state["a"].clone()})
    assert digest_tensors(state) != digest_tensors({"a": torch.tensor([float("nan"), 0.0])})


def test_the_state_is_left_alone() -> None:
    state = torch.arange(8)
    digest_tensors({"a": state})
    assert torch.equal(state, torch.arange(8))


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_parts_that_begin_and_end_anywhere(kind: torch.dtype) -> None:
    """Eight bytes are hashed at a time, of which a part of a buffer may begin and end in the middle."""
    buffer = torch.arange(40).to(kind)
    digests = set()
    for start in range(4):
        for end in range(24, 28):
            part = buffer[start:end]
            digests.add(digest_tensors({"a": part}))
            assert digest_tensors({"a": part}) == digest_tensors({"a": part.clone()})
    assert len(digests) == 16


def test_where_tensors_are_changes_nothing() -> None:
    """What is in host memory is brought to the device, tensor by tensor; a count of steps is always on the host."""
    state = {"weight": torch.ones(4, 4), "step": torch.tensor(3.0)}
    seen: list[torch.Tensor] = []

    class Elsewhere(torch.Tensor):
        def to(self, *positional: object, **_options: object) -> torch.Tensor:
            seen.append(self)
            return torch.Tensor.to(self.as_subclass(torch.Tensor), *positional)  # type: ignore[call-overload, no-any-return]

    away = {name: tensor.as_subclass(Elsewhere) for name, tensor in state.items()}
    assert digest_tensors(away, torch.device("cpu")) == digest_tensors(state)
    assert len(seen) == 1 and seen[0].dim() == 2
