# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients that begin in the backward pass, under a heterogeneous plan.

They are those of the cuts of layers. What members hold whole is summed inside their stage first, after the pass. May
import `executor` and this package.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_resihp.executor.routes import Step
from megatron_resihp.executor.slice_sums import Bucket
from megatron_resihp.executor.sums_under_way import SumsUnderWay
from megatron_resihp.integration.ops.final_gradients import FinalGradients, Watched
from megatron_resihp.integration.state.parameter_slices import Piece, pieces_of
from megatron_resihp.integration.world.heterogeneous import HeterogeneousView
from megatron_resihp.plan.slices import Slice


class EarlySums:
    """Those of one iteration on one worker.

    Attributes:
        final: is to be told of backward ops.
    """

    def __init__(
        self, view: HeterogeneousView, steps: Sequence[Step], buckets: Sequence[Bucket], model: Sequence[Any],
        checked: bool,
    ) -> None:  # fmt: skip
        """Begin to wait for gradients.

        Args:
            steps: of this worker in an iteration.
            buckets: whose sums may begin early.
            checked: whether norms are asked for.
        """
        pieces = _pieces(view, model)
        number_of = {piece: number for number, bucket in enumerate(buckets) for piece in bucket.slices}
        views: dict[Slice, list[tuple[str, torch.Tensor]]] = {piece: [] for piece in number_of}
        for each in pieces:
            if each.slice in number_of:
                views[each.slice].append((each.name, each.of(each.parameter.main_grad)))
        self._whole = [each.parameter.main_grad for each in pieces if each.slice not in number_of]
        self._stream = _stream()
        device = partial(_beside, torch.cuda.current_device(), self._stream)
        self._sums = SumsUnderWay(buckets, views, view.shares.contributed, checked, device)
        watched = (
            Watched(each.parameter, view.own_chunks[each.chunk], number_of[each.slice], _adds_once(each, view, model))
            for each in pieces
            if each.slice in number_of
        )
        self.final = FinalGradients(watched, [step.op for step in steps], self._sums.final, _moment)
        self.final.begin(range(len(buckets)))
        self._sums.begin()

    def finish(self) -> None:
        """Wait for all of these sums. Raises every error of theirs."""
        self._sums.finish()
        torch.cuda.current_stream().wait_stream(self._stream)

    def norms(self) -> list[torch.Tensor]:
        """Of all of this worker's gradients as its own ops have left them; after `finish`."""
        return [*self._sums.norms, *_norms(self._whole)]

    def give_up(self) -> None:
        """An op has failed."""
        self._sums.give_up()

    def join(self) -> None:
        """Wait until nothing here uses gradients any more; the epoch is broken."""
        self._sums.join()
        torch.cuda.current_stream().wait_stream(self._stream)


def own_norms(view: HeterogeneousView, model: Sequence[Any]) -> list[torch.Tensor]:
    """As `EarlySums.norms`, where nothing is summed yet."""
    return _norms([each.of(each.parameter.main_grad) for each in _pieces(view, model)])


def _pieces(view: HeterogeneousView, model: Sequence[Any]) -> list[Piece]:
    return list(pieces_of(model, view.shares.own, view.shares.cuts, view.tied_head))


@torch.no_grad()
def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch._foreach_norm(gradients)) if gradients else []


def _adds_once(piece: Piece, view: HeterogeneousView, model: Sequence[Any]) -> bool:
    """Whether a backward pass adds to a gradient once at most: layers that predict further tokens may be run several
    times in a pass, with the embeddings and the head."""
    decoders = range(1, view.chunks[-1].end - 1)
    return not model[0].config.mtp_num_layers or piece.slice.layer in decoders


@functools.cache
def _stream() -> Any:
    """One for all iterations: torch keeps memory for each stream apart."""
    return torch.cuda.Stream()


def _moment() -> Any:
    return torch.cuda.current_stream().record_event()


@contextmanager
def _beside(device: int, stream: Any) -> Iterator[None]:
    """This thread's work goes to a stream of its own."""
    torch.cuda.set_device(device)
    with torch.cuda.stream(stream):
        yield
