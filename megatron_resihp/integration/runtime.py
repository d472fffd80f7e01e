# SPDX-License-Identifier: Apache-2.0
"""One worker's objects, for the patches: there is one runtime for each process. May import everything but `cpu`.

Each part has one reason to change; functions that need one part only take that part.
"""

from collections.abc import Callable
from typing import Any

from megatron_resihp.control.linux import RunDelay
from megatron_resihp.control.worker.client import WorkerControl
from megatron_resihp.executor.groups.communicators import Communicators
from megatron_resihp.integration.held import Held
from megatron_resihp.integration.job import Job
from megatron_resihp.integration.logs.log import MegatronLog, logs_wanted
from megatron_resihp.integration.loop.notes import RecoveryNotes
from megatron_resihp.integration.loop.preparing import Preparation
from megatron_resihp.integration.modes.mode import Mode
from megatron_resihp.integration.probes.pads import Pads
from megatron_resihp.integration.probes.probe_clock import make_clock
from megatron_resihp.integration.probes.probe_sheet import Sheet
from megatron_resihp.integration.probes.probes import Probes
from megatron_resihp.integration.probes.scheduled import Scheduled
from megatron_resihp.integration.progress import Calls, Orders, Progress, Tally
from megatron_resihp.integration.saves.pending import Saves
from megatron_resihp.integration.setup import MegatronSetup
from megatron_resihp.integration.step.expert_loads import LoadCounter
from megatron_resihp.integration.world.view import View
from megatron_resihp.protocol.notices import PlanChange


class Runtime:
    """The parts of one worker. Made when the arguments are known. `send` takes the probes' notes and must not block.

    Attributes:
        job: what it knows for the whole job.
        control, communicators: its ends of the control plane and of process groups.
        preparation: what makes groups for the next plan while this one is run; missing until the patches are made.
        setup: how Megatron was set up.
        held: what it holds.
        log: what Megatron logs, if this worker is the one that does.
        mode: how the plan in force is run; after an epoch's end how it was run, without groups. Missing until the
            first world is built.
        feeds: its data loaders.
        progress, tally, calls, orders: how far it is, what Megatron's log is about to say, which of pretrain's calls
            it is in, and what comes after this step.
        loads: what counts the tokens of a mixture's experts.
        saves: checkpoints that are written while training goes on.
        recovery: what the last recovery took.
        probes, pads: what measures its iterations, and what makes them longer.
        scheduled: what flags schedule.
        joining: whether it was started anew and no plan has been run with it yet.
        on_trial: whether no step has been agreed on under a plan that was chosen.
    """

    preparation: Preparation
    mode: Mode

    def __init__(
        self, job: Job, control: WorkerControl, communicators: Communicators, send: Callable[[Sheet], None]
    ) -> None:
        self.job = job
        self.control = control
        self.communicators = communicators
        self.setup = MegatronSetup()
        self.held = Held(job.own)
        self.log = MegatronLog(control, logs_wanted(control.worker, job.args))
        self.feeds: list[Any] = []
        self.progress = Progress()
        self.tally = Tally()
        self.calls = Calls()
        self.orders = Orders()
        self.loads = LoadCounter(job.args.num_layers, job.args.num_experts or 0, job.args.expert_model_parallel_size)
        self.saves = Saves(job.args)
        self.recovery = RecoveryNotes()
        self.probes = Probes(control.worker, make_clock, send, RunDelay())
        self.pads = Pads()
        self.scheduled = Scheduled(job.config, control, self.progress)
        self.joining = False
        self.on_trial = False

    @property
    def worker(self) -> int:
        """This worker's id."""
        return self.control.worker

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.control.epoch

    @property
    def view(self) -> View:
        """What this worker is under the plan in force."""
        return self.mode.view

    @property
    def change(self) -> PlanChange | None:
        """The change of plan that this worker can leave the epoch for, as far as it has heard."""
        # In this order: what is heard of between both has its thread already.
        change = self.control.heard.change.of_epoch(self.control.epoch)
        return change if self.preparation.is_over() else None

    def reach(self, point: str) -> None:
        """Called where a fault injection may strike."""
        self.scheduled.injections.reach(point, self.progress.iteration)
