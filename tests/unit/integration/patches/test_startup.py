# SPDX-License-Identifier: Apache-2.0
"""What is kept of a job's start-up for later epochs."""

from __future__ import annotations

from megatron_resihp.integration.patches.startup import chosen_once


def test_a_script_chooses_ranks_as_the_job_began() -> None:
    """Whatever arguments say later, and for every pipeline alike."""
    arguments = {"has_mtp": True}

    def embedding_ranks(ranks: list[int]) -> list[int]:
        return [ranks[0], ranks[-1]] if arguments["has_mtp"] else [ranks[0]]

    chosen = chosen_once(embedding_ranks)
    assert chosen([4, 6, 8]) == [4, 8]
    arguments["has_mtp"] = False
    assert chosen([1, 3, 5]) == [1, 5]
    assert chosen([7]) == [7]
