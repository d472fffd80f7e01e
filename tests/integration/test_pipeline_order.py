# SPDX-License-Identifier: Apache-2.0
"""Real training jobs run their ops in the order of our programs.

This file is a training script as well: scripts/pretrain_gpt.py, without the plugin, that writes down its ops.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import REPOSITORY, Jobs, tiny

from megatron_resihp.detector.input.observations import Layout
from megatron_resihp.detector.input.recording import FILE_NAME, Recording
from megatron_resihp.detector.input.wire import unpack
from megatron_resihp.pipeline.op import Op, OpKind
from megatron_resihp.pipeline.schedules import interleaved, one_f_one_b

ITERATIONS = 2
SHORT = {"train_iters": ITERATIONS, "lr_warmup_iters": 0}
WITHOUT_PLUGIN = {"resihp": None, "resihp_record_samples": None, "resihp_record_digests": None}
TIMEOUT_S = 240


def test_recorded_jobs_ran_1f1b(jobs: Jobs) -> None:
    stages, micro_batches = 4, 6
    arguments = tiny(**SHORT, num_layers=stages, pipeline_model_parallel_size=stages, global_batch_size=micro_batches)
    job = jobs.run(arguments, workers=stages)
    assert job.code == 0, job.tails()

    found = list(Recording(job.run_dir / FILE_NAME))
    (layout,) = (item for item in found if isinstance(item, Layout))
    stage_of = dict(zip(layout.workers.tolist(), layout.stage.tolist(), strict=True))
    records = [unpack(item) for item in found if isinstance(item, bytes)]
    assert len(records) == stages * ITERATIONS
    program = one_f_one_b(stages, micro_batches)
    for record in records:
        stage = stage_of[record.worker]
        ran = [Op(OpKind(op["kind"]), stage, int(op["micro_batch"])) for op in sorted(record.ops, key=start_of)]
        assert tuple(ran) == program.ops[stage]


def start_of(op: Any) -> float:
    return float(op["start"])


DEVICES, CHUNKS, MICRO_BATCHES, GROUP_SIZE = 4, 2, 9, 5
"""A group of 5 micro-batches, and one of 4."""
INTERLEAVED = {
    "num_layers": DEVICES * CHUNKS, "pipeline_model_parallel_size": DEVICES, "global_batch_size": MICRO_BATCHES,
    "num_layers_per_virtual_pipeline_stage": 1, "microbatch_group_size_per_virtual_pipeline_stage": GROUP_SIZE,
}  # fmt: skip


@pytest.mark.nightly
def test_recorded_jobs_ran_interleaved_1f1b(jobs: Jobs) -> None:
    job = jobs.run(tiny(**SHORT, **INTERLEAVED), workers=DEVICES)
    assert job.code == 0, job.tails()
    records = [unpack(item) for item in Recording(job.run_dir / FILE_NAME) if isinstance(item, bytes)]
    assert len(records) == DEVICES * ITERATIONS
    program = interleaved(DEVICES, CHUNKS, MICRO_BATCHES, GROUP_SIZE)
    for record in records:
        ran = [Op(OpKind(op["kind"]), int(op["chunk"]) * DEVICES + record.worker, int(op["micro_batch"]))
               for op in sorted(record.ops, key=start_of)]  # fmt: skip
        assert tuple(ran) == program.ops[record.worker]


@pytest.mark.nightly
def test_megatron_ran_interleaved_1f1b(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES)]
    finished = subprocess.run(
        [*launcher, "-m", "megatron_resihp.cpu", __file__, *tiny(**SHORT, **WITHOUT_PLUGIN, **INTERLEAVED)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "OPS_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr
    for rank, ops in enumerate(interleaved(DEVICES, CHUNKS, MICRO_BATCHES, GROUP_SIZE).ops):
        noted = json.loads((tmp_path / f"rank{rank}").read_text())
        ran = [Op(OpKind(kind), chunk * DEVICES + rank, micro_batch) for kind, chunk, micro_batch in noted]
        assert tuple(ran) == ops * ITERATIONS


# ---- the training script


def main() -> None:
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import pretrain_gpt
    from megatron.core.pipeline_parallel import schedules

    ops: list[tuple[int, int, int]] = []
    outputs: list[tuple[Any, int, int]] = []
    forward_step, backward_step = schedules.forward_step, schedules.backward_step

    def noting_forward_step(*args: Any, **kwargs: Any) -> Any:
        result = forward_step(*args, **kwargs)
        where = kwargs["vp_stage"], kwargs["current_microbatch"]
        ops.append((OpKind.F, *where))
        outputs.append((result[0], *where))
        return result

    def noting_backward_step(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        (where,) = (rest for output, *rest in outputs if output is output_tensor)
        ops.append((OpKind.B, *where))
        return backward_step(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = noting_forward_step, noting_backward_step
    pretrain_gpt.main()
    Path(os.environ["OPS_DIRECTORY"], f"rank{os.environ['RANK']}").write_text(json.dumps(ops))


if __name__ == "__main__":
    main()
