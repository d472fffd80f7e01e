# SPDX-License-Identifier: Apache-2.0
"""Sets the device's generator and the states that Megatron's tracker keeps. Imports torch, megatron and `seeds`.

Nothing here waits for the device: the states of its generators are on the host.
"""

from functools import cached_property

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.tensor_parallel.random import _MODEL_PARALLEL_RNG_TRACKER_NAME as IN_SLICES

from megatron_resihp.integration.streams.seeds import BEFORE_LAYERS, EVERYBODY, WHOLE, Key, Part, seed_of

OP = "resihp-op"
"""A name in Megatron's tracker under which there is no state, but the iteration and the micro-batch being computed.
Recomputation restores all that the tracker has, so it finds those of the forward pass that it repeats."""


class Generators:
    """Lets each layer of a micro-batch draw from streams of its own. `seed`: the job's."""

    def __init__(self, seed: int) -> None:
        self._job = seed

    def begin_op(self, iteration: int, micro_batch: int) -> None:
        """A forward pass through some layers begins."""
        self._begin(torch.tensor((iteration, micro_batch)), BEFORE_LAYERS, sliced=False)

    def begin_layer(self, layer: int, *, sliced: bool) -> None:
        """A layer begins, in the forward pass or when that is recomputed.

        Args:
            layer: its number in the whole model.
            sliced: whether tensor-parallel workers have a slice of the sequence each between the layer's matrices.
                Megatron runs the layer with the generator in the state for slices then. The tracker can't be asked
                which state that is, because it doesn't know it during recomputation.
        """
        op = get_cuda_rng_tracker().get_states().get(OP)
        if op is not None:
            self._begin(op, layer, sliced)

    def end_ops(self) -> None:
        """No forward pass will be recomputed any more."""
        states = get_cuda_rng_tracker().get_states()
        if states.pop(OP, None) is not None:
            get_cuda_rng_tracker().set_states(states)

    def _begin(self, op: torch.Tensor, layer: int, sliced: bool) -> None:
        iteration, micro_batch = op.tolist()
        part = Part(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
        shared = (EVERYBODY, get_data_parallel_rng_tracker_name())

        def seed(kind: str) -> int:
            return seed_of(Key(self._job, iteration, micro_batch, layer, kind, WHOLE if kind in shared else part))

        tracker = get_cuda_rng_tracker()
        before = tracker.get_states().items()
        states = {name: self._restarted(state, seed(name)) for name, state in before if name != OP}
        tracker.set_states(states | {OP: op})
        _device_generator().manual_seed(seed(IN_SLICES if sliced else EVERYBODY))

    def _restarted(self, state: torch.Tensor | torch.Generator, seed: int) -> torch.Tensor | torch.Generator:
        """Transformer Engine's tracker keeps generators. The device's own may be one of them at the moment, so the same
        generator starts anew."""
        if isinstance(state, torch.Tensor):
            return self._state(seed)
        return state.manual_seed(seed)

    def _state(self, seed: int) -> torch.Tensor:
        self._spare.manual_seed(seed)
        return self._spare.get_state()

    @cached_property
    def _spare(self) -> torch.Generator:
        return torch.Generator(_device_generator().device)


def _device_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]
