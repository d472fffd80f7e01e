# SPDX-License-Identifier: Apache-2.0
"""Layers and stages: Megatron's layout strings in and out, and splits that hold each layer once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.plan import Chunk, PlanError, chunks_of_layout, even_chunks, layout_of
from megatron_resihp.plan.layers import chunks_from, format_layout, parse_layout

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, ...]:
    """The letters of each chunk of some model."""
    letters = "E" + "t" * draw(st.integers(0, 20)) + "m" * draw(st.integers(0, 2)) + "L"
    cuts = sorted(draw(st.lists(st.integers(0, len(letters)), max_size=8)))
    return tuple(letters[first:end] for first, end in zip([0, *cuts], [*cuts, len(letters)], strict=True))


class TestMegatronsLayout:
    def test_a_layout_in_and_out(self) -> None:
        text = "E|t*5|t*6|t,m,L"
        chunks = chunks_of_layout(text, 4)
        assert chunks == (Chunk(0, 0, 1), Chunk(1, 1, 6), Chunk(2, 6, 12), Chunk(3, 12, 14))
        assert layout_of(chunks, ["E", *12 * "t", "mL"]) == text

    def test_what_predicts_further_tokens_is_a_part_of_the_head(self) -> None:
        assert chunks_of_layout("Et|tm*3L", 2) == chunks_of_layout("Et|tL", 2) == (Chunk(0, 0, 2), Chunk(1, 2, 4))
        for text in ("Et|tm|L", "Et|m|mL"):
            with pytest.raises(PlanError, match="m and L must be in the same chunk, the last one"):
                chunks_of_layout(text, 3)

    def test_interleaved_chunks_go_to_stages_in_turns(self) -> None:
        assert chunks_of_layout("Et|tt|t|L", 2) == (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(0, 4, 5), Chunk(1, 5, 6))

    @given(chunks=layouts())
    def test_every_layout_comes_back(self, chunks: tuple[str, ...]) -> None:
        assert parse_layout(format_layout(chunks)) == chunks

    @pytest.mark.parametrize(
        "text",
        ["Ettt|(tt|)*29,m|L", "E,t*3|(t|)*4,L", "E|(t,t|)*2|L", "Et(t*2|t)*2L", "E||L", "E(|t)*3,L", "E|t*12|m*2,L"],
    )
    def test_is_read_as_megatron_reads_it(self, text: str) -> None:
        module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        read = module.PipelineParallelLayerLayout.parse_str_to_list(text)
        assert parse_layout(text) == tuple("".join(letters[layer.name] for layer in chunk) for chunk in read)

    @given(chunks=layouts())
    def test_megatron_reads_what_is_written(self, chunks: tuple[str, ...]) -> None:
        module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
        read = module.PipelineParallelLayerLayout.parse_str_to_list(format_layout(chunks))
        assert [len(chunk) for chunk in read] == [len(chunk) for chunk in chunks]

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("E|txt|L", "'x' is not a layer"),
            ("t|t|L", "begin with its only E"),
            ("E|t|E,L", "its only E"),
            ("E|m|t|L", "then m"),
            ("E|t|t", "end with its only L"),
            ("E|t*99999999999|L", "more than 10000 layers"),
            ("", "begin with its only E"),
        ],
    )
    def test_what_is_none_is_refused(self, text: str, rule: str) -> None:
        with pytest.raises(PlanError, match=rule):
            parse_layout(text)

    def test_chunks_that_stages_cannot_share(self) -> None:
        with pytest.raises(PlanError, match="3 chunks can't be dealt to 2 stages"):
            chunks_of_layout("E|t|L", 2)

    def test_what_megatron_cannot_say(self) -> None:
        wave = (Chunk(0, 0, 2), Chunk(1, 2, 4), Chunk(1, 4, 6), Chunk(0, 6, 8))
        with pytest.raises(PlanError, match="placed otherwise"):
            layout_of(wave, "EttttttL")
        with pytest.raises(PlanError, match="hold 8 layers, the model has 9"):
            layout_of(wave, "EtttttttL")


class TestSplits:
    @given(counts=COUNTS)
    def test_each_layer_is_in_one_chunk(self, counts: list[int]) -> None:
        chunks = chunks_from(counts, len(counts))
        assert [layer for chunk in chunks for layer in range(chunk.first, chunk.end)] == list(range(sum(counts)))
        assert [chunk.stage for chunk in chunks] == list(range(len(counts)))

    def test_megatrons_own_split(self) -> None:
        assert even_chunks(12, 3) == (Chunk(0, 0, 5), Chunk(1, 5, 9), Chunk(2, 9, 14))
        assert even_chunks(4, 1) == (Chunk(0, 0, 6),)
        with pytest.raises(PlanError, match="13 layers can't be split evenly over 3 stages"):
            even_chunks(13, 3)
