# SPDX-License-Identifier: Apache-2.0
"""Data that holds the padding token: which losses count follows from the sample, and not from who has read it."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import Jobs, check_training, tiny

from megatron_resihp.report.run.summary import compare

PADDING: dict[str, Any] = {"null_tokenizer_pad_id": 5, "train_iters": 6, "global_batch_size": 4}
"""One of the tokens that mock data is made of."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="a token of the data"),
        pytest.param({"null_tokenizer_pad_id": 63, "allow_ambiguous_pad_tokens": True}, id="the end of a document"),
    ],
)
def test_losses_are_masked_the_same_after_a_death(jobs: Jobs, flags: dict[str, Any]) -> None:
    """Each of two replicas has read another sample first when one dies."""
    model = PADDING | flags
    undisturbed = jobs.run(tiny(**model), workers=2)
    check_training(jobs.run(tiny(**model, resihp_inject="kill:1@3"), workers=2), undisturbed)
    # The control: the same data without padding trains something else.
    whole = jobs.run(tiny(train_iters=6, global_batch_size=4), workers=2)
    assert (compare(whole.summary.loss, undisturbed.summary.loss) or 0) > 1e-3
