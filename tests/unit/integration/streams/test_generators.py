# SPDX-License-Identifier: Apache-2.0
"""Streams of layers, in Megatron's own tracker and recomputation, with the CPU's generator as the device's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.tensor_parallel import random as megatrons
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, initialize_rng_tracker

from megatron_resihp.integration.streams.generators import OP, Generators
from megatron_resihp.integration.streams.patches import (
    has_own_streams,
    wrap_combined_step,
    wrap_forward_step,
    wrap_layer,
    wrap_prediction,
)

NAMES = ("model-parallel-rng", "data-parallel-rng", "expert-parallel-rng")
Draw = tuple[torch.Tensor, ...]


class GraphSafe:
    """A generator of a device, as far as trackers use it: a handle on a state that other generators may have too."""

    device = torch.device("cpu")

    def __init__(self, state: torch.Generator) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> GraphSafe:
        self.state.manual_seed(seed)
        return self

    def graphsafe_get_state(self) -> GraphSafe:
        return GraphSafe(self.state)

    def graphsafe_set_state(self, other: GraphSafe) -> None:
        self.state = other.state

    def clone_state(self) -> GraphSafe:
        return GraphSafe(self.state.clone_state())


class EngineTracker:
    """Transformer Engine's tracker (te_rng_tracker), as its sources have it since 1.5: the states are generators."""

    use_cudagraphable_rng = True

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        device = torch.cuda.default_generators[0]
        before = device.graphsafe_get_state()
        device.graphsafe_set_state(self.states_[name])
        try:
            yield
        finally:
            device.graphsafe_set_state(before)


def source() -> torch.Generator:
    """What the device draws from at the moment."""
    generator: Any = torch.cuda.default_generators[0]
    return generator.state if isinstance(generator, GraphSafe) else generator


def rand(size: int) -> torch.Tensor:
    return torch.rand(size, generator=source())


@pytest.fixture(params=["Megatron's states", "Megatron's generators", "Transformer Engine's generators"], autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device with the CPU's generator, or generators that share states, and a tracker."""
    for owner in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(owner, "current_device", lambda: 0)
        monkeypatch.setattr(owner, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    place(monkeypatch, 0, 1)
    before = torch.get_rng_state()
    initialize_rng_tracker(force_reset=True)
    if request.param == "Megatron's states":
        get_cuda_rng_tracker().set_states(dict.fromkeys(NAMES, torch.get_rng_state()))
    else:
        keep_generators(monkeypatch, EngineTracker() if "Engine" in request.param else CudaRNGStatesTracker())
    yield
    torch.set_rng_state(before)
    initialize_rng_tracker(force_reset=True)


def keep_generators(monkeypatch: pytest.MonkeyPatch, tracker: Any) -> None:
    """Let the tracker keep generators instead of their states."""
    device = GraphSafe(torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", (device,))
    tracker.use_cudagraphable_rng = True
    tracker.set_states({name: device.clone_state() for name in NAMES})
    monkeypatch.setattr(megatrons, "_CUDA_RNG_STATE_TRACKER", tracker)


def place(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Become a member of a tensor-parallel group."""
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_world_size", lambda: size)


def draw() -> Draw:
    """What the device's generator gives, and each of the tracker's streams."""
    drawn = [rand(4)]
    for name in NAMES:
        with get_cuda_rng_tracker().fork(name):
            drawn.append(rand(4))
    return tuple(drawn)


def draw_in_layer(layer: int, micro_batch: int = 0, iteration: int = 1, sliced: bool = False) -> Draw:
    generators = Generators(1234)
    generators.begin_op(iteration, micro_batch)
    generators.begin_layer(layer, sliced=sliced)
    return draw()


def alike(one: Draw, other: Draw) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_a_layer_draws_the_same_whatever_came_before() -> None:
    first = draw_in_layer(3)
    rand(100)
    draw_in_layer(2)
    assert all(alike(draw_in_layer(3), first))


@pytest.mark.parametrize("other", [{"layer": 2}, {"micro_batch": 1}, {"iteration": 2}])
def test_other_work_draws_other_numbers(other: dict[str, int]) -> None:
    assert not any(alike(draw_in_layer(3), draw_in_layer(**{"layer": 3} | other)))


def test_members_of_a_group_share_what_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 0, 2)
    first = draw_in_layer(3)
    place(monkeypatch, 1, 2)
    assert alike(draw_in_layer(3), first) == [True, False, True, False]


def test_slices_of_the_sequence_have_masks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 0, 2)
    first = draw_in_layer(3, sliced=True)
    place(monkeypatch, 1, 2)
    assert not torch.equal(draw_in_layer(3, sliced=True)[0], first[0])


def test_nothing_is_left_in_megatrons_tracker() -> None:
    generators = Generators(1234)
    generators.begin_op(1, 0)
    assert OP in get_cuda_rng_tracker().get_states()
    generators.end_ops()
    assert set(get_cuda_rng_tracker().get_states()) == set(NAMES)
    state = source().get_state()
    generators.begin_layer(1, sliced=False)  # outside of ops: none of this plugin's business
    assert torch.equal(source().get_state(), state)


class Layer(torch.nn.Module):
    """Draws as a transformer layer does: for its slice and for everybody."""

    def __init__(self, layer_number: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.layer_number, self.is_mtp_layer = layer_number, False
        self.config = SimpleNamespace(sequence_parallel=sequence_parallel)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self.config.sequence_parallel else get_cuda_rng_tracker().fork():
            given = given * (rand(len(given)) < 0.5)
        return given * given * (rand(len(given)) < 0.5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_draws_the_masks_of_its_own_micro_batch(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool
) -> None:
    """Two layers are recomputed together, after the forward pass of another micro-batch."""
    place(monkeypatch, 1, 2)
    generators = Generators(1234)
    forward = wrap_layer(generators, Layer.forward)
    layers = [Layer(number, sequence_parallel) for number in (1, 2)]

    def both(given: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            given = forward(layer, given)
        return given

    def run(micro_batch: int, block: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        generators.begin_op(5, micro_batch)
        given = torch.ones(64, requires_grad=True)
        with get_cuda_rng_tracker().fork() if sequence_parallel else nullcontext():
            return given, block(given)

    def gradient(block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (given, result), (_, later) = run(0, block), run(1, block)
        later.sum().backward()
        result.sum().backward()
        return given.grad

    expected = gradient(both)
    assert 0 < expected.count_nonzero() < 64
    assert torch.equal(gradient(lambda given: checkpoint(both, False, given)), expected)


def test_evaluations_draw_nothing_from_them() -> None:
    begun: list[Any] = []
    generators: Any = SimpleNamespace(begin_op=lambda *op: begun.append(op), begin_layer=begun.append)
    runtime: Any = SimpleNamespace(view=SimpleNamespace(numbering=(4, 6)), progress=SimpleNamespace(iteration=9))
    step = wrap_forward_step(runtime, generators, lambda *_, **__: None)
    model = torch.nn.Identity()
    step(None, None, model, 2, None, current_microbatch=1)
    model.eval()
    step(None, None, model, 2, None, current_microbatch=7)
    wrap_layer(generators, lambda layer: None)(model)
    assert begun == [(9, 6)]


def test_of_two_micro_batches_that_are_run_in_turns_the_forward_one_draws() -> None:
    begun: list[Any] = []
    generators: Any = SimpleNamespace(begin_op=lambda *op: begun.append(op))
    runtime: Any = SimpleNamespace(view=SimpleNamespace(numbering=(4, 6)), progress=SimpleNamespace(iteration=9))
    step, model = wrap_combined_step(runtime, generators, lambda *_, **__: None), torch.nn.Identity()
    step(None, None, model, 2, None, [], None, current_microbatch=0)
    step(None, None, model, 2, None, [], model, current_microbatch=1)
    step(None, None, None, 2, None, [], model, current_microbatch=None)
    assert begun == [(9, 4), (9, 6)]


@pytest.mark.parametrize(("dropout", "megatrons", "own"), [(0.1, False, True), (0.1, True, False), (0, False, False)])
def test_who_has_streams_of_its_own(dropout: float, megatrons: bool, own: bool) -> None:
    args = SimpleNamespace(
        hidden_dropout=dropout, attention_dropout=0, moe_input_jitter_eps=None, moe_router_force_load_balancing=False
    )
    job: Any = SimpleNamespace(args=args, config=SimpleNamespace(resihp_megatron_random_streams=megatrons))
    assert has_own_streams(job) is own


def test_predictions_of_further_tokens_draw_other_numbers_than_layers() -> None:
    """Megatron counts their layers from 1, as the decoder's; each also embeds tokens, before its layer begins."""
    generators = Generators(1234)
    generators.begin_op(1, 0)
    config = SimpleNamespace(sequence_parallel=False, num_layers=2)

    def forward(layer: Any) -> Draw:
        return draw()

    def layer(number: int, predicts: bool) -> Any:
        return SimpleNamespace(layer_number=number, is_mtp_layer=predicts, config=config, training=True)

    run, embed = wrap_layer(generators, forward), wrap_prediction(generators, forward)
    drawn = [run(layer(number, predicts)) for predicts in (False, True) for number in (1, 2)]
    drawn += [embed(layer(number, True)) for number in (1, 2)]
    assert len({tuple(numbers[0].tolist()) for numbers in drawn}) == len(drawn)
    assert all(alike(run(layer(2, True)), drawn[3])) and all(alike(embed(layer(1, True)), drawn[4]))
