# SPDX-License-Identifier: Apache-2.0
"""The picture of a run; how it looks is for eyes, what is in it is checked here."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_resihp.report.run.marks import MarkKind, find_marks, label_rows
from megatron_resihp.report.run.picture import draw
from megatron_resihp.report.run.summary import summarize

REPORT = Path(__file__).parents[4] / "megatron_resihp" / "report"


def test_marks_say_who_died_of_what_and_when_the_run_was_back(recovered_run: Any) -> None:
    first, second = find_marks(summarize(recovered_run.events))
    assert (first.after, first.label) == (10, "worker 3: exit signal 9, back in 930 ms")
    assert (second.after, second.label) == (25, "workers 5 and 6: node lost, back in 2.2 s")


def test_changes_say_what_is_done_otherwise_and_verdicts_why(changed_run: Any) -> None:
    marks = find_marks(summarize(changed_run.events))
    assert [(mark.after, mark.kind, mark.label) for mark in marks[1:]] == [
        (10, MarkKind.CHANGE, "worker 11 came back: the first plan again"),
        (15, MarkKind.VERDICT, "worker 6 at 50 %"),
        (20, MarkKind.CHANGE, "layers 3+3, 4+2, micro-batches 5+3"),
        (25, MarkKind.VERDICT, "worker 6 healthy again"),
        (30, MarkKind.CHANGE, "the first plan again"),
    ]
    assert (marks[0].after, marks[0].kind, marks[0].recovered) == (5, MarkKind.DEATH, True)


def test_verdicts_of_one_moment_share_a_mark(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run()
    run.write("verdict", kind="compute", change="onset", workers=[6], speed=0.5, since=16, iteration=18)
    run.write("verdict", kind="link", change="onset", workers=[1, 5], speed=0.3, since=16, iteration=19)
    [mark] = find_marks(summarize(run.events))
    assert (mark.after, mark.label) == (15, "worker 6 at 50 %, link 1–5 at 30 %")


def test_a_death_that_ended_the_run_is_marked_as_such(synthetic_run: Callable[..., Any]) -> None:
    run = synthetic_run(first_iteration=100)
    run.step()
    run.die(3)
    assert [(mark.after, mark.recovered) for mark in find_marks(summarize(run.events))] == [(101, False)]


def test_the_picture_holds_the_labels(recovered_run: Any, synthetic_run: Callable[..., Any], tmp_path: Path) -> None:
    reference = synthetic_run(seed=1)
    reference.step(40)
    summary = summarize(recovered_run.events)
    draw(summary, summarize(reference.events), tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    # The SVG keeps every drawn text as a comment beside its outlines.
    assert "worker 3: exit signal 9, back in 930 ms" in text
    assert "uninterrupted run, relative difference at most" in text
    assert "samples/s" in text


def test_the_picture_tells_who_came_back_and_what_was_slow(changed_run: Any, tmp_path: Path) -> None:
    draw(summarize(changed_run.events), None, tmp_path / "run.svg")
    text = (tmp_path / "run.svg").read_text()
    assert "worker 11 came back: the first plan again" in text and "worker 6 at 50 %" in text


def test_the_picture_tells_who_joined(synthetic_run: Callable[..., Any], tmp_path: Path) -> None:
    run = synthetic_run()
    run.step(5)
    run.change("workers 8, 9 joined", [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]])
    run.step(35)
    run.finish()
    draw(summarize(run.events), None, tmp_path / "run.svg")
    assert "workers 8, 9 joined: " in (tmp_path / "run.svg").read_text()


def test_a_run_with_holes_and_infinite_loss_can_be_drawn(synthetic_run: Callable[..., Any], tmp_path: Path) -> None:
    run = synthetic_run()
    run.step(1, loss={"lm loss": "nan"})
    run.step(1, loss={"lm loss": "inf"}, duration_s=0.0)
    run.step(1, loss={})
    draw(summarize(run.events), None, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 50)), max_size=12))
def test_labels_of_one_row_never_overlap(labels: list[tuple[float, float]]) -> None:
    spans = sorted((left, left + width) for left, width in labels)
    rows = label_rows(spans)
    for row in set(rows) - {None}:
        in_row = [span for span, its_row in zip(spans, rows, strict=True) if its_row == row]
        assert all(a[1] <= b[0] for a, b in pairwise(in_row))


def test_only_pictures_need_matplotlib_and_nothing_needs_torch() -> None:
    imported = {path: _imports(path) for path in REPORT.rglob("*.py")}
    drawing = {path for path, modules in imported.items() if "matplotlib" in modules}
    assert drawing == {path for path in imported if path.name == "picture.py"}
    assert set.union(*imported.values()).isdisjoint({"torch", "megatron"})
    at_the_top = {path for path in imported if "megatron_resihp.report.run.picture" in _imports(path, whole=True)}
    assert not at_the_top, "a picture's module is imported only where a picture is wanted"


def _imports(path: Path, whole: bool = False) -> set[str]:
    """Packages, or whole module names, that a file imports when it is imported itself."""
    modules: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            modules |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            modules.add(statement.module)
    return modules if whole else {module.split(".")[0] for module in modules}
