# SPDX-License-Identifier: Apache-2.0
"""Whether times are predicted and a slow device is named, in jobs on packed documents. Imports the plugin's reports.

One job has a single worker, whose times are predicted. In the other, kernels that spin slow one of two workers. These
share the GPU, so they are two stages with one micro-batch, and never compute at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Final

from launching import Launched, launch
from setting import REPOSITORY, Row, Setting, python

sys.path.append(str(REPOSITORY / "benchmarks"))
from prediction import GOALS, WARM_UP, evaluate

CASES: Final = ("prediction", "slow-worker")
PACKED: Final = Path(__file__).with_name("packed_gpt.py")
DATA_S: Final = 120.0
VOCABULARY: Final = 257
LAYERS: Final = 4
SLOW_AT: Final = 62
CLEARED_AT: Final = 82
END: Final = 100
SPEED: Final = 0.7
LARGE: Final = {"hidden-size": 2048, "num-attention-heads": 16, "seq-length": 2048}
SMALL: Final = {"hidden-size": 32, "num-attention-heads": 4, "seq-length": 64}
REHEARSED_ITERATIONS: Final = 60
DOCUMENTS: Final = 3000
SPREAD: Final = 1.3
"""Standard deviation of the logarithm of document lengths."""


def run(setting: Setting, name: str) -> Row:
    return _predict(setting, name) if name == "prediction" else _slow(setting, name)


def _predict(setting: Setting, name: str) -> Row:
    iterations = REHEARSED_ITERATIONS if setting.stand_in else 2 * WARM_UP + 2
    job = _train(setting, name, 1, [], **{"global-batch-size": 8, "train-iters": iterations})
    if job.codes != [0]:
        return {"ok": False, "codes": job.codes}
    found = evaluate(job.run_dir, WARM_UP)
    kept = ("iterations", "iteration_s", "iteration_spread", "noise", *GOALS, *(f"level_{goal}" for goal in GOALS))
    good = all(found[goal] <= limit for goal, limit in GOALS.items())
    return {"ok": good or setting.stand_in, **{name: round(found[name], 3) for name in kept}}


def _slow(setting: Setting, name: str) -> Row:
    injections = [f"slow:1:{SPEED}@{SLOW_AT}", f"clear@{CLEARED_AT}"]
    flags = ["--pipeline-model-parallel-size", "2", "--resihp-inject", *injections]
    job = _train(setting, name, 2, flags, **{"global-batch-size": 1, "train-iters": END})
    said = [(each.change, list(each.workers), round(each.speed, 2), each.iteration) for each in job.summary.verdicts]
    named = [workers for change, workers, _, _ in said if change == "onset"]
    good = job.codes == [0, 0] and named == [[1]] and [each[0] for each in said] == ["onset", "recovery"]
    rehearsed = setting.stand_in and job.codes == [0, 0] and len(job.summary.loss) == END
    return {"ok": good or rehearsed, "codes": job.codes, "verdicts": said, "speed": SPEED}


def _make_documents(setting: Setting, prefix: Path) -> None:
    """Documents mostly shorter than a sample, with a heavy tail."""
    random, median = Random(0), (SMALL if setting.stand_in else LARGE)["seq-length"] / 10
    lengths = [1 + int(median * random.lognormvariate(0.0, SPREAD)) for _ in range(DOCUMENTS)]
    texts = prefix.with_suffix(".jsonl")
    texts.write_text("".join(json.dumps({"text": "abcdefghij" * (n // 10 + 1)}) + "\n" for n in lengths))
    make = python(str(REPOSITORY / "scripts" / "make_dataset.py"), str(prefix), str(texts))
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=DATA_S)


def _train(setting: Setting, name: str, workers: int, flags: list[str], **model: int) -> Launched:
    data = setting.out / f"{name}-documents"
    _make_documents(setting, data)
    own = ["--data-path", str(data), "--dataloader-inter-document-masking", *([] if setting.stand_in else ["--bf16"])]
    sizes = {**(SMALL if setting.stand_in else LARGE), "num-layers": LAYERS, "vocab-size": VOCABULARY, **model}
    return launch(setting, name, workers, [*own, *flags], script=PACKED, data=(), **sizes)
