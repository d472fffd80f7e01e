# SPDX-License-Identifier: Apache-2.0
"""What one process writes in a file for another is read as it was, and what is damaged is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_instances import spoiled, with_more

from megatron_resihp.coding import (
    FILE,
    Form,
    MissingFieldError,
    Tolerance,
    WrongValueError,
    decode,
    encode,
    omitted_if,
    version_said,
)
from megatron_resihp.control.commands.contact import ADDED_TO, Contact
from megatron_resihp.control.commands.launch.claim import Owner
from megatron_resihp.control.replanning.by_choice.proposals import Proposal
from megatron_resihp.control.transport.address import Address
from megatron_resihp.control.worker.saved_state import LastSave
from megatron_resihp.cost import profile
from megatron_resihp.cost.fitted import store
from megatron_resihp.cost.fitted.fit import fit
from megatron_resihp.cost.fitted.model import CostModel, LinkCost
from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.judging import learned
from megatron_resihp.detector.judging.learned import UnitsNoise
from megatron_resihp.detector.judging.noise import KnownNoise
from megatron_resihp.plan import Chunk, Coordinate, Migration, ParallelPlan, PlanError, Replica, Schedule, Shard, files
from megatron_resihp.plan import parallel_plan as plans
from megatron_resihp.simulator import documents

LISTED = decode(Schedule, {"name": "explicit", "orders": ["F0.0 F1.0 B0.0 B1.0", "F0.1 F1.1 B0.1 B1.1"]})
HELPED = Replica(((0,), (1,)), (0, 1), (Chunk(0, 0, 2), Chunk(1, 2, 4)), LISTED)
PLAN = plans._Written((HELPED,), {4: Coordinate(0, 0), 5: (Shard(0, 2, 0, 1),), 6: None}, (Migration(0, 1, 1),), True)
COUNTS = np.array([0, 2, 1, 3])
LAYOUT = Layout(3, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS.reshape(2, 2), native=False)
GROUPS = np.ones((2, 3, 1, 12))
MODEL = CostModel(fit(GROUPS, GROUPS, GROUPS), fit(GROUPS, GROUPS, np.full(GROUPS.shape, np.nan)),
                  {(0, 1): LinkCost(1e-3, 1e-9, True, float("nan"))}, {"optimizer": 0.1})  # fmt: skip
ONES = np.ones((1, 1))
NOISE = UnitsNoise(((0,),), KnownNoise(ONES, ONES, ONES, ONES, np.ones((1, 3)), 2))
OF_ANY_NAME = {"terms.optimizer", "strategies.joint", "standbys.4", "standbys.5", "standbys.6"}
"""Entries of a mapping, which need not be there."""


@dataclass(frozen=True)
class File:
    """Something that is written and read.

    Attributes:
        optional: fields that need not be there.
        free: fields that hold JSON of others.
        tolerance: of its reader.
    """

    kind: type
    plain: Any
    optional: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    tolerance: Tolerance = FILE


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILES = {
    "owner": File(Owner, encode(Owner.this()), words("machine started")),
    "contact": File(Contact, encode(Contact(Address("::1", 29500), "7f")), tolerance=ADDED_TO),
    "saved state": File(LastSave, encode(LastSave(7, "emergency_checkpoint", ((0, 1),), 1.5)),
                        words("by_parameter gaps")),
    "plan": File(plans._Written, encode(PLAN), words("migrations uneven_shards chunks schedule orders")),
    "plan of a strategy": File(
        files._File, {"plan": {}, "no_plan": "too few", "strategies": {"joint": {"no_plan": "too few"}}},
        words("plan no_plan strategies"), words("plan"),
    ),
    "proposal": File(Proposal, encode(Proposal("worker 3", 0.1, 1.0, 2.0, 3.0, ParallelPlan((HELPED,)))),
                     words("chunks schedule orders version")),
    "cost model": File(store._Written, encode(store._written(MODEL))),
    "noise": File(learned._Section, encode(learned._Section(learned._Noise(*[learned._written(NOISE)] * 2)))),
    "profile": File(profile._Written, json.loads((profile.BUILT_IN / "a100.json").read_text()), words("device"),
                    words("version source assumptions")),
    "layout": File(Layout, encode(LAYOUT), words("native")),
    "documents": File(documents._Quantiles, {"probabilities": [0.0, 1.0], "quantiles": [8.0, 9.0]}),
}  # fmt: skip


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> File:
    return FILES[request.param]


def test_what_is_written_is_read(file: File) -> None:
    found = decode(file.kind, json.loads(json.dumps(file.plain)), file.tolerance)
    if file.plain == encode(found):
        assert encode(decode(file.kind, encode(found), file.tolerance)) == encode(found), "in memory, too"
    else:
        assert file.free or file.kind is profile._Written, "only what others wrote has more"


def test_what_others_add_is_read_over(file: File) -> None:
    """Wherever it is."""
    mapped = {"standbys", "terms", "strategies", *file.free}
    found = decode(file.kind, with_more(file.plain, mapped), file.tolerance)
    assert encode(found) == encode(decode(file.kind, file.plain, file.tolerance))


def test_each_field_is_there_and_of_its_type(file: File) -> None:
    for path, gone, value in spoiled(file.plain):
        name = path.rpartition(".")[2]
        if file.free.intersection(path.split(".")) or (gone and (name in file.optional or path in OF_ANY_NAME)):
            continue
        error = refusal(file, value)
        assert error is not None and error.path, path
        assert f"{path}.".startswith(f"{error.path}."), (path, str(error))
        assert len(str(error)) < 400, "however large the value is"
        assert "." in path or isinstance(error, MissingFieldError) == gone


def refusal(file: File, value: Any) -> WrongValueError | None:
    try:
        decode(file.kind, value, file.tolerance)
    except WrongValueError as error:
        return error
    return None


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("plan", lambda path: ParallelPlan.from_dict(files.read_plan(path)), PlanError),
        ("plan of a strategy", files.read_plan, PlanError),
        ("cost model", store.load, store.CostModelError),
        ("profile", lambda path: profile.load_profile(str(path)), profile.ProfileError),
    ],
)
def test_the_error_of_a_file_is_one_line_that_names_the_field(
    tmp_path: Path, name: str, read: Callable[[Path], Any], error: type[Exception]
) -> None:
    file = FILES[name]
    for path, gone, value in spoiled(file.plain):
        names = path.split(".")
        if gone or file.free.intersection(names) or path.startswith("strategies."):
            continue
        with pytest.raises(error) as caught:
            read(write(tmp_path / "file.json", value))
        said = str(caught.value)
        assert "\n" not in said and len(said) < 500 and any(each in said for each in names), (path, said)


class TestForms:
    @dataclass(frozen=True)
    class Reading:
        """A dataclass with a field that may be left out."""

        value: int
        unit: str = omitted_if("s")
        noise: float = 0.0

    def test_what_is_usual_is_left_out_and_may_always_be(self) -> None:
        assert encode(self.Reading(3)) == {"value": 3, "noise": 0.0}
        assert encode(self.Reading(3, "ms"))["unit"] == "ms"
        assert decode(self.Reading, {"value": 3, "noise": 0.0}) == self.Reading(3)

    def test_who_reads_says_whether_other_defaults_may_be_missing_and_others_known(self) -> None:
        with pytest.raises(MissingFieldError, match="'noise' is missing"):
            decode(self.Reading, {"value": 3})
        with pytest.raises(WrongValueError, match="'colour' is unknown"):
            decode(self.Reading, {"value": 3, "noise": 0.0, "colour": "red"}, Tolerance(missing=True))
        assert decode(self.Reading, {"value": 3, "colour": "red"}, FILE) == self.Reading(3)

    def test_a_form_of_its_own_is_named_where_it_is_wrong(self) -> None:
        plan = replace(PLAN, standbys={})
        data = {**encode(plan), "standbys": {"4": [[0, 2, 0]]}}
        with pytest.raises(WrongValueError, match=r"'standbys\.4\.0' has 3 items, not 4"):
            decode(plans._Written, data, FILE)
        assert Form(str, int).from_plain("3") == 3

    @pytest.mark.parametrize(
        ("value", "version"), [({}, None), ({"version": 3, "more": 1}, 3), ({"version": "x"}, "x")]
    )
    def test_the_version_that_is_said(self, value: Any, version: Any) -> None:
        assert version_said(value) == version

    def test_a_list_says_no_version(self) -> None:
        with pytest.raises(WrongValueError, match="not an object"):
            version_said([])


@dataclass
class Counted:
    """What changes in place has lists and sets."""

    names: list[str]
    numbers: set[int]
    by_pair: dict[tuple[int, int], float]


def test_lists_sets_and_mappings_by_pairs_are_rows() -> None:
    counted = Counted(["b", "a"], {3, 1}, {(2, 1): 0.5, (0, 4): 1.0})
    plain = encode(counted)
    assert plain == {"names": ["b", "a"], "numbers": [1, 3], "by_pair": [[[2, 1], 0.5], [[0, 4], 1.0]]}
    assert decode(Counted, json.loads(json.dumps(plain))) == counted
    with pytest.raises(WrongValueError, match=r"by_pair\.0"):
        decode(Counted, {**plain, "by_pair": [[2, 1]]})
