# SPDX-License-Identifier: Apache-2.0
"""The loop of a standby, in place of Megatron's train(): receive each final gradient, take part in the agreement, step.

May import this package's other modules.
"""

from megatron_resihp.integration.loop.recovery import leave_if_agreed
from megatron_resihp.integration.loop.telemetry import report_recovered
from megatron_resihp.integration.loop.validation import validate
from megatron_resihp.integration.patches.counting import advance_schedule, batch_grows, count_consumed
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.state.digests import record_digests
from megatron_resihp.integration.step.extra_states import share_extra_state
from megatron_resihp.integration.step.step import agree, begin_copys_step, see_reduced, take_step


def keep_current(runtime: Runtime) -> None:
    """Step with the others until the epoch breaks or the job ends; returns only by an exception."""
    while True:
        leave_if_agreed(runtime, batch_grows(runtime) and not _is_over(runtime))
        runtime.progress.begin(runtime.progress.iteration + 1, None)
        runtime.scheduled.ask_for_plans(runtime.progress.iteration, runtime.view.reports)
        runtime.mode.begin_iteration()
        runtime.mode.share_gradients()
        share_extra_state(runtime)
        see_reduced(runtime)
        outcome = agree(runtime, 0.0)
        runtime.progress.agreed(outcome)
        runtime.on_trial = False
        take_step(runtime, outcome)
        begin_copys_step(runtime)
        if runtime.orders.validation is not None:
            validate(runtime)
        advance_schedule(runtime, outcome)
        count_consumed(runtime)
        # Nobody can tell a standby which step is the last one in time for it to say what it holds then.
        record_digests(runtime)
        report_recovered(runtime)


def _is_over(runtime: Runtime) -> bool:
    """Whether those that work may train no more: then they end, and all hear of that in the step that never comes."""
    args, done = runtime.job.args, runtime.progress.iteration
    outcome = runtime.progress.outcomes.get(done)
    told = outcome is not None and outcome.stop
    leaves = bool(args.exit_interval) and done % args.exit_interval == 0
    return told or leaves or args.consumed_train_samples >= args.train_samples
