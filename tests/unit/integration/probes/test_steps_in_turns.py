# SPDX-License-Identifier: Apache-2.0
"""What the probes note where a forward and a backward pass are run in turns: both ops, and messages inside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_resihp.detector.input.records import IterationRecord, OpKind
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.integration.probes.steps_in_turns import wrap_combined_step

WORKERS = (10, 11, 12, 13)
CHUNK: Any = object()
"""Stands for a model's chunk."""


class SlowClock:
    """The host's clock, as slow as a test wants; each look at it takes a second."""

    immediate = True
    now = 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def anchor(self) -> None:
        pass

    def resolve(self, marks: Any) -> Any:
        return marks

    def reset(self) -> None:
        pass


class Pipeline:
    """A stage, and what is run on it."""

    def __init__(self) -> None:
        self.clock = SlowClock()
        self.sent: list[IterationRecord] = []
        self.probes = Probes(3, lambda: self.clock, lambda sheet: self.sent.append(sheet.record()))
        self.probes.begin(0, 1, (4, 6), WORKERS)
        self.pads: Any = None
        self.step = wrap_combined_step(self.probes, lambda: self.pads, lambda: (32.0, 1024.0), self.run)

    def run(self, *positional: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Megatron's step: each pass takes 3 s."""
        forward, backward = positional[2] is not None, positional[6] is not None
        output, gradient = torch.empty(4), torch.empty(8)
        for name in ("pre_forward", "pre_backward"):
            if options.get(name):
                options[name](0)
        self.clock.now += 3.0 * forward + 3.0 * backward
        for name, tensor in (("post_forward", output), ("post_backward", gradient)):
            if options.get(name):
                options[name](tensor, 0)
        return output if forward else None, 0, gradient if backward else None

    def call(self, index: int | None, backward: Any = None, **options: Any) -> Any:
        forward = None if index is None else CHUNK
        return self.step(
            None, None, forward, 2, None, [], None if backward is None else CHUNK, None, backward, None, None,
            f_model_chunk_id=0, current_microbatch=index, **options,
        )  # fmt: skip

    def record(self) -> IterationRecord:
        self.probes.finish()
        [record] = self.sent
        return record


def test_two_that_are_run_in_turns_share_their_time() -> None:
    """The ends of an iteration are run alone."""
    pipeline = Pipeline()
    output, *_ = pipeline.call(0)
    output, *_ = pipeline.call(1, output)
    pipeline.call(None, output)
    ops = pipeline.record().ops
    assert ops["kind"].tolist() == [OpKind.F, OpKind.F, OpKind.B, OpKind.B]
    assert ops["micro_batch"].tolist() == [4, 6, 4, 6]
    assert (ops["end"] - ops["start"]).tolist() == pytest.approx([4.0, 7 / 3, 14 / 3, 4.0])
    assert ops["end"][1] == ops["start"][2]


def test_what_is_waited_for_inside_is_no_work() -> None:
    pipeline = Pipeline()
    output, *_ = pipeline.call(0)

    def wait(stage: int) -> None:
        pipeline.clock.now += 50.0

    pipeline.call(1, output, pre_forward=wait, pre_backward=wait)
    ops = pipeline.record().ops
    assert ops["end"][2] - ops["start"][1] == 7.0


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "afterwards"])
def test_messages_belong_to_the_ops_that_have_made_them(inside: bool) -> None:
    pipeline = Pipeline()
    probes = pipeline.probes
    output, *_ = pipeline.call(0)

    def post(kind: OpKind, peer: int) -> Any:
        def posted(tensor: torch.Tensor, stage: int) -> None:
            probes.transfers.done([probes.transfers.post(tensor, peer, kind, False, probes.mark())], None)

        return posted

    posts = {"post_forward": post(OpKind.F, 2), "post_backward": post(OpKind.B, 0)}
    output, _, gradient = pipeline.call(1, output, **posts if inside else dict.fromkeys(posts))
    if not inside:
        posts["post_backward"](gradient, 0)
        posts["post_forward"](output, 0)
    transfers = sorted(pipeline.record().transfers.tolist())
    assert [(row[2], row[4]) for row in transfers] == [(OpKind.B, 4), (OpKind.F, 6)]


def test_both_are_padded_one_after_the_other() -> None:
    pipeline = Pipeline()
    padded: list[tuple[Any, ...]] = []

    def pad(*values: Any) -> float:
        padded.append(values)
        return 0.0

    output, *_ = pipeline.call(0)
    pipeline.pads = pad
    pipeline.call(1, output)
    assert [values[:4] for values in padded] == [(OpKind.F, 0, 32.0, 1024.0), (OpKind.B, 0, 32.0, 1024.0)]
    assert padded[0][4] < padded[1][4]


def test_nothing_is_noted_between_iterations() -> None:
    pipeline = Pipeline()
    pipeline.record()
    assert pipeline.call(0)[0] is not None and not pipeline.probes.ops.in_op
