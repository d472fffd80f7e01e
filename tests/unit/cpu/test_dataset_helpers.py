# SPDX-License-Identifier: Apache-2.0
"""On CPUs a checkout of Megatron that has compiled nothing borrows the wheel's compiled dataset helper."""

import sys
from pathlib import Path

import pytest

from megatron_resihp.cpu import dataset_helpers


def test_the_wheels_helper_stands_in_for_one_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, dataset_helpers.MODULE, None)
    monkeypatch.setattr(dataset_helpers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(dataset_helpers.dataset_utils, "compile_helpers", lambda: pytest.fail("compiled"))
    dataset_helpers.install()
    assert hasattr(sys.modules[dataset_helpers.MODULE], "build_sample_idx_int32")
    dataset_helpers.dataset_utils.compile_helpers()


def test_without_a_wheel_it_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make_fails() -> None:
        sys.exit(1)

    monkeypatch.setattr(dataset_helpers, "WHEEL", "no-such-package")
    assert not dataset_helpers.borrow(dataset_helpers.wheels_helper())
    (tmp_path / "helpers_cpp.so").write_bytes(b"no library")
    assert not dataset_helpers.borrow(tmp_path / "helpers_cpp.so")
    with pytest.raises(SystemExit, match=r"pip install pybind11 && make -C .*datasets"):
        dataset_helpers.saying_what_it_needs(make_fails)()


def test_a_wheel_of_another_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_helpers.package_info, "__version__", "0.1.0")
    assert dataset_helpers.wheels_helper() is None
