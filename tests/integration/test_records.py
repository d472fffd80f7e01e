# SPDX-License-Identifier: Apache-2.0
"""What real training jobs record: everything, once, in the order in which it was run, through recoveries too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import WISHING, Job, Jobs, check_training, tiny
from nursery import SUSPECTS

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.input.recording import FILE_NAME, Recording
from megatron_resihp.detector.input.records import IterationRecord, OpKind, SpanKind
from megatron_resihp.detector.input.wire import unpack

ITERATIONS = 6


def recorded(job: Job) -> tuple[list[Layout], list[IterationRecord]]:
    """Layouts and records of a run, as they lie in its directory."""
    found = list(Recording(job.run_dir / FILE_NAME))
    layouts = [item for item in found if isinstance(item, Layout)]
    return layouts, [unpack(item) for item in found if isinstance(item, bytes)]


def check_ops(record: IterationRecord, micro_batches: list[int]) -> None:
    """Every op of every micro-batch once, one after the other, each forward before its backward."""
    ops = record.ops
    for kind in (OpKind.F, OpKind.B):
        assert ops["micro_batch"][ops["kind"] == kind].tolist() == micro_batches
    assert (ops["start"] <= ops["end"]).all() and (ops["end"][:-1] <= ops["start"][1:]).all()
    assert record.start <= ops["start"][0] and ops["end"][-1] <= record.end
    waited = ops["waited"]
    assert (waited >= 0).all() and (waited <= ops["end"] - ops["start"] + 1e-6).all()
    when = {(op["kind"], op["micro_batch"]): number for number, op in enumerate(ops)}
    assert all(when[OpKind.F, number] < when[OpKind.B, number] for number in micro_batches)


def check_transfers(records: dict[int, IterationRecord], link: tuple[int, int], micro_batches: list[int]) -> None:
    """Both sides know of every transfer, of the same size, and nobody has received before it was sent."""
    first, second = link
    for kind, sender, receiver in ((OpKind.F, first, second), (OpKind.B, second, first)):
        sent, received = (
            rows[(rows["kind"] == kind) & (rows["peer"] == peer) & (rows["received"] == side)]
            for rows, peer, side in (
                (records[sender].transfers, receiver, 0), (records[receiver].transfers, sender, 1),
            )
        )  # fmt: skip
        assert sent["micro_batch"].tolist() == received["micro_batch"].tolist() == micro_batches
        assert (sent["bytes"] == received["bytes"]).all() and (sent["bytes"] > 0).all()
        assert (sent["posted"] <= received["done"]).all()
        assert (received["posted"] <= received["done"]).all() and (sent["posted"] <= sent["done"]).all()


def packed(documents: Path, **changes: Any) -> list[str]:
    return tiny(
        **{
            "mock_data": False, "data_path": documents, "vocab_size": 257, "dataloader_inter_document_masking": True,
            "data_cache_path": documents.with_name("cache"), "global_batch_size": 8, "train_iters": ITERATIONS,
            "pipeline_model_parallel_size": 2,
            **changes,
        }
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.since_megatron("0.19")
def test_eight_workers_record_every_op_transfer_and_document(jobs: Jobs, documents: Path) -> None:
    arguments = packed(documents, tensor_model_parallel_size=2, eval_interval=3, eval_iters=1)
    job = jobs.start(arguments, workers=8, script=WISHING, wishes=["packing"]).wait()
    assert job.code == 0, job.tails()

    (layout,), records = recorded(job)
    plan = job.events("epoch_started")[0]["plan"]
    share = {w: r["micro_batches"] for r in plan["replicas"] for stage in r["stages"] for w in stage}
    by_key = {(record.iteration, record.worker): record for record in records}
    assert len(records) == len(by_key) == 8 * ITERATIONS
    assert not any(record.lost for record in records)
    for (_, worker), record in by_key.items():
        check_ops(record, share[worker])
        assert np.isfinite(record.ops["waited"]).all() and (record.ops["waited"] > 0).any(), "TP 2 waits"
        assert {SpanKind.DATA, SpanKind.GRADIENT_SYNC, SpanKind.AGREEMENT, SpanKind.OPTIMIZER} <= set(
            record.spans["kind"]
        )
    for iteration in range(1, ITERATIONS + 1):
        of_iteration = {worker: by_key[iteration, worker] for worker in range(8)}
        for link in layout.links.tolist():
            check_transfers(of_iteration, tuple(link), share[link[0]])
    # What was evaluated after iteration 3 is told with iteration 4, and only there.
    evaluated = {r.iteration for r in records if SpanKind.EVALUATION in r.spans["kind"]}
    assert evaluated == {4}
    for worker in range(8):
        check_documents(job, worker, [by_key[number, worker] for number in range(1, ITERATIONS + 1)])


def check_documents(job: Job, worker: int, records: list[IterationRecord]) -> None:
    """N and Σ l² are those of the documents that this worker's model was given."""
    lines = (job.run_dir / f"packing_{worker}").read_text().splitlines()
    bounds = [np.diff([int(word) for word in line.split()]) for line in lines]
    training = iter(bounds)
    for record in records:
        for row in record.workload:
            lengths = next(training)
            assert row["tokens"] == lengths.sum() and row["squares"] == (lengths**2).sum()
        if record.iteration == 3:
            for _ in record.workload:
                next(training)  # the evaluation's
    assert len({float(row["squares"]) for record in records for row in record.workload}) > 3, "documents differ"


def test_recording_goes_on_in_the_next_epoch(jobs: Jobs) -> None:
    arguments = tiny(pipeline_model_parallel_size=2, train_iters=ITERATIONS)
    reference = jobs.reference(arguments, workers=4)
    job = jobs.run([*arguments, "--resihp-inject", "kill:1@3:backward"], workers=4)
    check_training(job, reference)

    layouts, records = recorded(job)
    assert [layout.epoch for layout in layouts] == [0, 1]
    after = [record for record in records if record.epoch == 1]
    expected = {(number, worker) for number in range(4, ITERATIONS + 1) for worker in layouts[1].workers.tolist()}
    assert expected <= {(record.iteration, record.worker) for record in after}
    micro_batches = job.events("epoch_started")[-1]["plan"]["replicas"][0]["micro_batches"]
    for record in after:
        check_ops(record, micro_batches)
    assert {record.iteration for record in records if record.epoch == 0} <= {1, 2, 3}
    (summary,) = job.events("detection")
    assert summary["iterations"] >= ITERATIONS - 1


def test_healthy_jobs_have_no_verdict(jobs: Jobs) -> None:
    job = jobs.reference(tiny(pipeline_model_parallel_size=2, train_iters=ITERATIONS), workers=4)
    assert not job.events("verdict")
    assert "no worker or link was found slow" in job.output()


@pytest.mark.parametrize("judge", [pytest.param("hangs", marks=pytest.mark.nightly), "fails"])
def test_training_does_not_need_the_judge(jobs: Jobs, judge: str) -> None:
    arguments = tiny(train_iters=ITERATIONS)
    reference = jobs.reference(arguments, workers=2)
    job = jobs.run(arguments, workers=2, judge=judge)
    check_training(job, reference)
    assert [event["part"] for event in job.events("detection_failed")] == ["verdicts"] * (judge == "fails")


def test_suspects_are_tested_between_two_iterations(jobs: Jobs) -> None:
    """Matrix products on the suspects, once, while training goes on as if nothing were."""
    arguments = tiny(pipeline_model_parallel_size=2, train_iters=ITERATIONS)
    reference = jobs.reference(arguments, workers=4)
    job = jobs.run(arguments, workers=4, judge="suspects")
    check_training(job, reference)

    tests = {event["worker"]: event for event in job.events("validation")}
    _, records = recorded(job)
    assert len(job.events("validation")) == len(tests) and set(tests) == set(SUSPECTS)
    assert len({(event["number"], event["iteration"]) for event in tests.values()}) == 1
    for event in tests.values():
        assert event["gemm_seconds"] and min(event["gemm_seconds"]) > 0 and event["seconds"] > 0
    tested = {record.worker for record in records if SpanKind.VALIDATION in record.spans["kind"]}
    assert tested == set(tests)
