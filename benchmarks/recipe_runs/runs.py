# SPDX-License-Identifier: Apache-2.0
"""The runs of one recipe: stock Megatron, the same without steps, and with the plugin through a death and back.

Starts jobs through the nursery of the integration tests. May import `jobs` from there, and this package.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from jobs import Job, Nursery

from megatron_resihp.cost.training import why_own_degree
from megatron_resihp.plan import ParallelPlan
from megatron_resihp.plan.rules import Sharing
from recipe_runs.compare import Logged, read_logged
from recipe_runs.filling import write_documents
from recipe_runs.plans import (
    CHANGE_AT,
    HOLD_AT,
    Death,
    draw_death,
    sharing_replicas,
    unlike_replicas,
)
from recipe_runs.shrinking.devices import DOCUMENTS
from recipe_runs.shrinking.draft import Draft, read_options
from recipe_runs.shrinking.grid import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    LAYER_COUNT,
    PIPELINE,
    TENSOR,
    sharers_of_experts,
)
from recipe_runs.shrinking.schedule import batch_in
from recipe_runs.shrinking.shrink import Shrunk

RUN_S: Final = 240.0
"""How long a run may take. On slow cores one of 8 workers takes over 120."""
SCRIPT: Final = Path(__file__).with_name("logged_gpt.py")
ERROR: Final = re.compile(r"(resihp: |[\w.]*(Error|Exception|Broken|Assertion)\w*(:|$))")
LONGEST: Final = 300
LARGER: Final = "global batches of"
"""So begins why a plan has followed another where batches grow."""
"""Characters of what is quoted."""


class RunFailed(Exception):
    """A run crashed or did not end; the message says how."""


@dataclass(frozen=True)
class Run:
    """What a run has logged, and the seconds that it took."""

    logged: Logged
    seconds: float


class Runner:
    """Runs a recipe, each kind of run in a directory of its own, which the next one of the kind empties.

    Args:
        directory: for the runs.
    """

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self._nursery = nursery
        self._directory = directory
        write_documents(directory / Path(DOCUMENTS).name)

    def stock(self, shrunk: Shrunk, name: str, *changes: str) -> Run:
        """Megatron without the plugin; `changes` are flags that come last, and so count."""
        return self._finish(self._start(shrunk, name, changes, without_plugin=True), name)

    def through_death(self, shrunk: Shrunk, random: Random) -> tuple[Run, Death]:
        """With the plugin: a death, a change to another plan without the dead, and the return of the dead."""
        death = draw_death(random, shrunk.workers, Draft(read_options(shrunk.words, {})).number(PIPELINE))
        run_dir = self._new_directory("death")
        plan = run_dir / "plan.json"
        plan.write_text(json.dumps(plan_of(shrunk, death).to_dict()))
        (run_dir / "hold").write_text(str(HOLD_AT))
        flags = ("--resihp", "--resihp-inject", str(death), "--resihp-plan", f"{plan}@{CHANGE_AT}")
        job = self._start(shrunk, "death", flags, run_dir=run_dir, max_restarts=1)
        course = _Course(job, run_dir)
        run = self._finish(job, "death", course.go_on)
        course.check()
        return run, death

    def _start(
        self, shrunk: Shrunk, name: str, changes: Sequence[str], run_dir: Path | None = None, **options: object
    ) -> Job:
        run_dir = run_dir or self._new_directory(name)
        words = [*shrunk.in_directory(run_dir), *changes]
        return self._nursery.start(run_dir, words, workers=shrunk.workers, script=SCRIPT, **options)

    def _new_directory(self, name: str) -> Path:
        run_dir = self._directory / name
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        return run_dir

    def _finish(self, job: Job, name: str, meanwhile: Callable[[], None] = lambda: None) -> Run:
        try:
            job.wait(RUN_S, meanwhile)
        except AssertionError as error:
            raise RunFailed(f"{name}: {str(error).splitlines()[0]}") from None
        if job.code != 0:
            raise RunFailed(f"{name}: exit code {job.code}: {last_words(job)}")
        return Run(read_logged(job.run_dir / "logged"), job.seconds)


def plan_of(shrunk: Shrunk, death: Death) -> ParallelPlan:
    """The survivors' plan."""
    draft = Draft(read_options(shrunk.words, {}))
    survivors = [worker for worker in range(shrunk.workers) if worker != death.worker]
    micro_batches = batch_in(draft, CHANGE_AT + 1) // draft.number("--micro-batch-size")
    tensor = draft.number(TENSOR)
    if max(draft.number(CONTEXT), draft.number(EXPERT)) > 1:
        return sharing_replicas(survivors, tensor, draft.number(PIPELINE), _sharing(draft), micro_batches)
    only = tensor if why_own_degree(_arguments(draft)) else None
    return unlike_replicas(survivors, tensor, draft.number(LAYER_COUNT) + 2, micro_batches, only)


def _arguments(draft: Draft) -> dict[str, str | bool]:
    """By Megatron's names, switches as True. Without those of the device: workers run on the stand-in."""
    return {flag.removeprefix("--").replace("-", "_"): draft.text(flag) or True for flag in draft.options}


def _sharing(draft: Draft) -> Sharing:
    if not draft.has("--num-experts"):
        return Sharing(draft.number(CONTEXT))
    tensor = draft.number(TENSOR)
    members = draft.number(EXPERT_TENSOR, tensor)
    return Sharing(draft.number(CONTEXT), sharers_of_experts(draft), members if members < tensor else 0)


def last_words(job: Job) -> str:
    """The line that most likely says why a job failed: the last error in a worker's output, or in the launcher's."""
    texts = [job.log(worker) for worker in range(2 * job.workers)] + [job.output()]
    lines = [line for text in texts for line in text.splitlines()]
    errors = [line for line in lines if ERROR.match(line) and "ChildFailed" not in line]
    return (errors or lines[-1:] or ["it said nothing"])[0].strip()[:LONGEST]


class _Course:
    """What the benchmark does while a job goes through a death: it lets the dead in once the survivors' plan holds."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        self._job = job
        self._run_dir = run_dir

    def go_on(self) -> None:
        if not (self._run_dir / "join").exists():
            refused = self._job.events("change_refused")
            if refused or self._steps_after_change():
                (self._run_dir / "join").touch()
        elif self._job.events("worker_waiting"):
            (self._run_dir / "go_on").touch()

    def _steps_after_change(self) -> bool:
        epochs = {event["to_epoch"] for event in self._changes()}
        return any(event["epoch"] in epochs for event in self._job.events("iteration"))

    def _changes(self) -> list[dict[str, Any]]:
        """Those that were asked for: each larger batch begins with another one."""
        return [event for event in self._job.events("reconfiguration") if not event["why"].startswith(LARGER)]

    def check(self) -> None:
        """Raises RunFailed unless everything happened that was to happen."""
        for event in self._job.events("change_refused") + self._job.events("plan_failed"):
            raise RunFailed(f"death: {event['event']}: {event.get('reason') or event['error']}")
        changes = self._changes()
        if not self._job.events("worker_dead") or not self._job.events("worker_waiting") or len(changes) != 2:
            whys = [event["why"] for event in changes]
            raise RunFailed(f"death: not everything happened that was to happen; changes of plan: {whys}")
