# SPDX-License-Identifier: Apache-2.0
"""Norms and counts over unlike replicas: each slice of a parameter, and of its gradient, is counted by one worker."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_resihp.integration.state.slice_state import (
    counted_gradients,
    counted_norm_squared,
    counted_parameters_squared,
    zeros_in,
)
from megatron_resihp.integration.world.slice_shares import SliceShares
from megatron_resihp.plan import Chunk, ParallelPlan, Replica

LAYERS = (Chunk(0, 0, 2), Chunk(0, 2, 3))
PLAN = ParallelPlan((Replica(((0,),), (0, 1), LAYERS), Replica(((1, 2),), (2,), LAYERS)), {3: None})
"""One worker has all, two others a half each, and one is a standby without state."""
CUT = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.weight", "output_layer.weight")
WHOLE = "decoder.layers.0.norm.weight"
OWN_DEGREE = 2
HELD = {0: slice(None), 1: slice(0, 4), 2: slice(4, 8)}


def model_of(worker: int, masters: bool = False) -> list[torch.nn.Module]:
    """The same parameters and gradients on each worker, or its part of them. The head is a chunk of its own."""
    torch.manual_seed(1)
    return [chunk_of(worker, masters, *CUT[:2], WHOLE), chunk_of(worker, masters, CUT[2])]


def chunk_of(worker: int, masters: bool, *names: str) -> torch.nn.Module:
    module: Any = torch.nn.Module()
    module.config = SimpleNamespace()
    for name in names:
        kept = HELD[worker] if name in CUT else slice(None)
        whole, gradient = torch.randn(8, 3), torch.randn(8, 3) * (torch.rand(8, 3) < 0.5)
        parameter: Any = torch.nn.Parameter(whole[kept].clone())
        parameter.main_grad = gradient[kept].clone()
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = name in CUT, 0, 1
        if masters:
            parameter.main_param = 2 * parameter.detach()
        module.register_parameter(name.replace(".", "/"), parameter)
    named = list(module.named_parameters())
    module.named_parameters = lambda: [(name.replace("/", "."), each) for name, each in named]
    chunk: torch.nn.Module = module
    return chunk


def parameters_of(worker: int) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for chunk in model_of(worker) for name, parameter in chunk.named_parameters()}


def over_all(count: Any, tied_head: int | None = None, **options: Any) -> float:
    return sum(count(model_of(worker, **options), SliceShares(PLAN, worker, tied_head), OWN_DEGREE) for worker in HELD)


def parameters_squared(*held: Any, counts_masters: int = 0) -> float:
    return counted_parameters_squared(*held, counts_masters)


def test_all_is_counted_once() -> None:
    parameters = list(parameters_of(0).values())
    squares = float(sum(parameter.detach().double().square().sum() for parameter in parameters))
    gradients: list[torch.Tensor] = [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]
    assert over_all(parameters_squared) == pytest.approx(squares, rel=1e-6)
    assert over_all(counted_norm_squared) == pytest.approx(float(sum(g.square().sum() for g in gradients)), rel=1e-6)
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    assert over_all(lambda *held: zeros_in(counted_gradients(*held))) == zeros > 0


def test_masters_count_as_often_as_they_are_said_to_and_else_their_parameters_once() -> None:
    once = over_all(parameters_squared)
    for times, expected in ((0, once), (1, 4 * once), (2, 8 * once)):
        masters = over_all(partial(parameters_squared, counts_masters=times), masters=True)
        assert masters == pytest.approx(expected, rel=1e-6)
        assert over_all(partial(parameters_squared, counts_masters=times)) == once, "there are no masters"


def test_word_embeddings_that_are_the_head_too_are_counted_once() -> None:
    """Which of their two copies, which are equal in a job, does not matter."""
    untied, tied = over_all(parameters_squared), over_all(parameters_squared, tied_head=2)
    parameters = parameters_of(0)
    copies = [float(parameters[name].detach().square().sum()) for name in (CUT[0], CUT[2])]
    assert any(tied == pytest.approx(untied - copy, rel=1e-6) for copy in copies)


def test_a_standby_counts_nothing() -> None:
    shares = SliceShares(PLAN, 3, None)
    assert parameters_squared([], shares, OWN_DEGREE) == 0.0
    assert zeros_in(counted_gradients([], shares, OWN_DEGREE)) == 0
