# SPDX-License-Identifier: Apache-2.0
"""RunSummary -> the run's faults: broken promises of the contract, as far as an event log can show them.

May import: the standard library and this package's modules.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_resihp.report.run.headline import samples
from megatron_resihp.report.run.run_summary import RunSummary
from megatron_resihp.report.words import listing, relative_difference


def faults(summary: RunSummary) -> list[str]:
    """One line for each broken promise; a promise without records counts as broken."""
    return [*_end(summary), *_samples(summary), *_loss(summary)]


def _end(summary: RunSummary) -> Iterator[str]:
    if summary.exit_code is None:
        yield "the run has not ended"
    elif not summary.completed:
        yield f"the run ended with exit code {summary.exit_code}"
    elif summary.job is not None and summary.iterations != summary.job.train_iters:
        yield f"the run ended at iteration {summary.iterations} of {summary.job.train_iters}"
    for failure in summary.failures:
        yield f"worker {failure.worker} raised an error"


def _samples(summary: RunSummary) -> Iterator[str]:
    if summary.samples_consumed is None:
        yield "samples not recorded (run with --resihp-record-samples)"
    elif summary.log_damaged or summary.samples_lost or summary.samples_applied_twice or summary.samples_out_of_place:
        yield samples(summary)


def _loss(summary: RunSummary) -> Iterator[str]:
    if summary.loss_reference is None:
        return
    start = summary.job.first_iteration if summary.job else 0
    alone = sorted(i for i in summary.loss.keys() ^ summary.loss_reference.keys() if i > start)
    difference = summary.loss_max_relative_difference
    if difference is None:
        yield "no iteration in common with the reference run"
    elif alone:
        yield f"iteration {listing(alone[:5])} has a loss in one of the two runs only"
    if difference is not None and not difference <= summary.loss_bound:
        bound = f"sums in another order give {summary.loss_bound:.1e} at most"
        yield f"loss against the reference run: {relative_difference(difference)}; {bound}"
