# SPDX-License-Identifier: Apache-2.0
"""Device profiles: the arithmetic, the files of the package, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.cost.profile import BUILT_IN, DeviceProfile, LayerKind, ProfileError, load_profile


def profile_data(**changes: Any) -> dict[str, Any]:
    """10 ms forward at 100 tokens in one document, 20 % of it attention; B twice that, W like F without attention."""
    passes = {
        "F": {"seconds": 0.010, "attention": 0.2},
        "B": {"seconds": 0.020, "attention": 0.2},
        "W": {"seconds": 0.010, "attention": 0.0},
    }
    data = {
        "version": 1,
        "device": "test",
        "reference": {"tokens": 100, "squares": 10_000, "tensor_parallel": 2},
        "sequence": 1000,
        "time_scale": 1.0,
        "fixed_seconds": 0.0,
        "boundary_bytes_per_token": 4,
        "layers": {kind: passes for kind in LayerKind},
        "links": {
            "workers_per_node": 2,
            "within_node": {"latency_s": 0.001, "bytes_per_s": 4000},
            "between_nodes": {"latency_s": 0.01, "bytes_per_s": 400},
        },
        "noise": {"relative": 0.01, "seed": 1},
    }
    return data | changes


def profile(**changes: Any) -> DeviceProfile:
    return DeviceProfile.from_dict(profile_data(**changes))


class TestTimes:
    def test_at_the_reference_they_are_the_published_ones(self) -> None:
        costs = profile().stage([LayerKind.TRANSFORMER], tensor_parallel=2)
        assert [cost.seconds(100, 10_000) for cost in costs] == pytest.approx([0.010, 0.020, 0.010])

    def test_tokens_and_squares_count_apart(self) -> None:
        forward, _, weight = profile().stage([LayerKind.TRANSFORMER], tensor_parallel=2)
        # Ten documents of 10 in place of one of 100: attention, 2 ms, falls to a tenth.
        assert forward.seconds(100, 10 * 10**2) == pytest.approx(0.008 + 0.0002)
        assert forward.seconds(200, 200**2) == pytest.approx(2 * 0.008 + 4 * 0.002)
        assert weight.seconds(200, 200**2) == pytest.approx(0.020)

    @given(layers=st.lists(st.sampled_from(LayerKind), max_size=8), degree=st.sampled_from([1, 2, 4, 8]))
    def test_layers_add_up_and_members_share_all_but_the_fixed_part(self, layers: list[LayerKind], degree: int) -> None:
        forward, _, _ = profile(fixed_seconds=0.001).stage(layers, degree)
        assert forward.seconds(100, 10_000) == pytest.approx(len(layers) * (0.001 + 0.009 * 2 / degree))

    def test_the_clock_can_be_compressed(self) -> None:
        slow, fast = profile(fixed_seconds=0.001), profile(fixed_seconds=0.001, time_scale=0.25)
        layers = [LayerKind.EMBEDDING, LayerKind.MLP]
        for one, other in zip(slow.stage(layers, 1), fast.stage(layers, 1), strict=True):
            assert other.seconds(70, 500) == pytest.approx(0.25 * one.seconds(70, 500))
        assert fast.transfer_seconds((0, 3), 100) == pytest.approx(0.25 * slow.transfer_seconds((0, 3), 100))

    def test_links_within_a_node_and_between_two(self) -> None:
        assert profile().transfer_seconds((2, 3), 100) == pytest.approx(0.001 + 400 / 4000)
        assert profile().transfer_seconds((1, 2), 100) == pytest.approx(0.01 + 400 / 400)

    def test_a_pass_that_takes_nothing_has_no_fixed_part(self) -> None:
        nothing = {name: {"seconds": 0.0, "attention": 0.0} for name in "FBW"}
        layers = {kind: nothing for kind in LayerKind}
        assert profile(layers=layers, fixed_seconds=0.001).stage([LayerKind.HEAD], 1)[2].seconds(100, 100) == 0.0


class TestFiles:
    @pytest.mark.parametrize("name", ["h800", "a100"])
    def test_those_of_the_package(self, name: str) -> None:
        found = load_profile(name)
        assert found.device == name.upper()
        data = json.loads((BUILT_IN / f"{name}.json").read_text())
        assert data["source"] and data["assumptions"]

    def test_the_a100_is_an_h800_with_a_lower_peak(self) -> None:
        a100, h800 = load_profile("a100"), load_profile("h800")
        for kind in LayerKind:
            for slow, fast in zip(a100.passes[kind], h800.passes[kind], strict=True):
                ratio = slow.seconds(4096, 4096**2) / max(fast.seconds(4096, 4096**2), 1e-9)
                assert ratio == pytest.approx(989.4 / 312 if ratio else 0.0, rel=1e-4)

    def test_published_times_on_the_h800(self) -> None:
        """AdaPtis, arXiv 2509.23722: llama3-70b's transformer layer takes 5.6, 6.84 and 4.37 ms."""
        passes = load_profile("h800").passes[LayerKind.TRANSFORMER]
        assert [cost.seconds(4096, 4096**2) for cost in passes] == pytest.approx([0.0056, 0.00684, 0.00437])

    def test_one_of_the_users(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(profile_data()))
        assert load_profile(str(path)) == profile()


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"version": 2}, "version is 2; this package reads version 1"),
            ({"sequence": None}, "'sequence' is None, not a number"),
            ({"sequence": True}, "'sequence' is True, not a number"),
            ({"time_scale": 0}, "'time_scale' is 0, not above 0"),
            ({"time_scale": float("nan")}, "'time_scale' is nan, not a number"),
            ({"fixed_seconds": -1}, "'fixed_seconds' is -1, not 0 or more"),
            ({"layers": {}}, "'layers.embedding' is missing"),
            ({"links": []}, "'links' is [], not an object"),
        ],
    )
    def test_one_line_says_what_is_wrong(self, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(json.dumps(profile_data(**changes)))
        with pytest.raises(ProfileError) as error:
            load_profile(str(path))
        assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)

    def test_more_attention_than_there_is(self) -> None:
        passes = {name: {"seconds": 1.0, "attention": 1.5} for name in "FBW"}
        with pytest.raises(ProfileError, match=r"embedding F: attention 1\.5 is a share"):
            profile(layers={kind: passes for kind in LayerKind})

    @pytest.mark.parametrize(("text", "said"), [("{", "Expecting"), ("[1]", "not an object"), ("\xff", "utf-8")])
    def test_no_json(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ProfileError, match=said) as error:
            load_profile(str(path))
        assert "\n" not in str(error.value)

    def test_no_file_is_answered_with_what_there_is(self) -> None:
        with pytest.raises(ProfileError, match=r"device profile b200: No such file or directory; .* a100, h800"):
            load_profile("b200")
