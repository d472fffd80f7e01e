# SPDX-License-Identifier: Apache-2.0
"""How well times of micro-batches and iterations are predicted, in percent, on documents that the fit has not seen.

Trains a small GPT on packed real documents (the standard library's docstrings) under the emulated clock, 8 workers at
TP 2, PP 2, DP 2, fits the costs on the first iterations of the run's own records and predicts the rest. A micro-batch's
time is the own compute of all its ops on one worker, without waits in collectives. `--run-dir` evaluates a run that has
been recorded before instead.

A micro-batch's figure holds the emulated device's own noise, and what the fit adds to it: what the machine adds to an
op counts as waiting. An iteration's holds that, too. Eight real processes on few cores are often late: `--time-scale`
stretches the emulated clock until the device's times dominate. `noise` is the fitted ops' own, in percent; `level_…`
are the errors of always predicting the usual time, for comparison.

May import the standard library, numpy and `megatron_resihp` without torch.
"""

import argparse
import ast
import json
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import ROOT, add_time_scale, load_average, print_result, running

from megatron_resihp.cost.profile import BUILT_IN
from megatron_resihp.detector.input.counters import Counters
from megatron_resihp.detector.input.observations import IterationObservations, Layout
from megatron_resihp.detector.input.recording import FILE_NAME, Recording
from megatron_resihp.detector.input.replay import steps_of
from megatron_resihp.detector.interface import iteration_seconds
from megatron_resihp.detector.judging.prediction import Prediction, mape

GOALS = {"micro_batch_mape": 1.2, "iteration_mape": 2.8}
SKIPPED, WARM_UP = 2, 50
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SEQUENCE, BATCH = 256, 8
EMULATED_SEQUENCE = 32768
"""Tokens that a sequence stands for: a long sequence, so that its documents matter."""
TIME_SCALE = 0.15
"""Seconds of the emulated clock per second of the device: much more than the profiles' own, for two cores."""
JOB_S = 1800.0


def command(profile: Path, iterations: int, data: Path, run_dir: Path) -> list[str]:
    """The job: what `scripts/demo.sh` trains, under the emulated clock."""
    sizes = {
        "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "micro-batch-size": 1,
        "global-batch-size": BATCH, "train-iters": iterations, "num-layers": 4, "hidden-size": 64,
        "num-attention-heads": 4, "seq-length": SEQUENCE, "max-position-embeddings": SEQUENCE,
        "position-embedding-type": "rope", "attention-dropout": 0, "hidden-dropout": 0, "lr": 1e-3,
        "data-path": data, "split": "98,1,1", "tokenizer-type": "NullTokenizer", "vocab-size": 257, "eval-iters": 0,
        "eval-interval": iterations, "log-interval": 10, "distributed-backend": "gloo", "transformer-impl": "local",
        "attention-backend": "unfused", "resihp-emulate": profile,
    }  # fmt: skip
    without = ("gradient-accumulation-fusion", "persist-layer-norm", "masked-softmax-fusion", "bias-gelu-fusion",
               "bias-dropout-fusion", "rope-fusion")  # fmt: skip
    return [
        sys.executable, "-m", "megatron_resihp.cli", "launch", "--stand-in", "--nproc-per-node", "8",
        "--run-dir", str(run_dir), str(ROOT / "scripts" / "pretrain_gpt.py"), "--resihp",
        *(text for name, value in sizes.items() for text in (f"--{name}", str(value))),
        *(f"--no-{name}" for name in without), "--dataloader-inter-document-masking",
    ]  # fmt: skip


def docstrings() -> Iterator[str]:
    """The standard library's docstrings: real documents, mostly shorter than a sequence, with a heavy tail."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.parts):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_bytes())
            except SyntaxError:
                continue
            nodes = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
            yield from filter(None, map(ast.get_docstring, nodes))


def train(profile: str, time_scale: float, iterations: int, directory: Path) -> Path:
    """Run the job; returns its run directory."""
    data, run_dir, stretched = directory / "docstrings", directory / "run", directory / "profile.json"
    device = json.loads((BUILT_IN / f"{profile}.json").read_text())
    stretched.write_text(json.dumps({**device, "time_scale": time_scale, "sequence": EMULATED_SEQUENCE}))
    lines = [json.dumps({"text": text}) for text in docstrings()]
    (directory / "docstrings.jsonl").write_text("\n".join(lines))
    make = [sys.executable, str(ROOT / "scripts" / "make_dataset.py"), str(data), f"{data}.jsonl"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, timeout=JOB_S)
    with running(command(stretched, iterations, data, run_dir), directory / "output") as job:
        if job.wait(JOB_S) != 0:
            raise RuntimeError(f"the job failed: {(directory / 'output').read_text()[-500:]}")
    return run_dir


def evaluate(run_dir: Path, warm_up: int) -> dict[str, Any]:
    """Fit on the first iterations of a recorded run, predict the others."""
    recording, counters = Recording(run_dir / FILE_NAME), Counters()
    steps = list(steps_of(recording, counters))
    layouts = [step for step in steps if isinstance(step, Layout)]
    iterations = [step for step in steps if isinstance(step, IterationObservations)]
    if len(layouts) != 1 or len(iterations) <= SKIPPED + warm_up:
        raise RuntimeError(f"{len(layouts)} epochs and {len(iterations)} iterations are no run to be predicted")
    learned = iterations[SKIPPED : SKIPPED + warm_up]
    prediction = Prediction(layouts[0], learned)
    rest = iterations[SKIPPED + warm_up :]
    measured, predicted = prediction.micro_batches(rest)
    observed = np.array([iteration_seconds(each) for each in rest])
    expected = prediction.iterations(rest)
    noise = prediction.model.ops.noise
    usual = np.nanmedian(prediction.micro_batches(learned)[0], axis=(0, 2))[:, None]
    usual_iteration = np.median([iteration_seconds(each) for each in learned])
    return {
        "micro_batch_mape": 100 * mape(measured, predicted),
        "iteration_mape": 100 * mape(observed, expected),
        "level_micro_batch_mape": 100 * mape(measured, usual),
        "level_iteration_mape": 100 * mape(observed, usual_iteration),
        "noise": 100 * float(np.nanmedian(noise)),
        "informative": bool(prediction.model.informative[np.isfinite(noise)].all()),
        "iterations": len(rest),
        "iteration_s": float(np.nanmedian(observed)),
        "iteration_spread": 100 * float(np.nanstd(observed) / np.nanmean(observed)),
        "terms_s": dict(prediction.model.terms),
        "left_out": counters.nonzero(),
        "observed_s": observed.tolist(),
        "predicted_s": expected.tolist(),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Observed against predicted iteration times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(result["predicted_s"], color="#f2b27a", linewidth=3, label="predicted")
    axes.plot(result["observed_s"], color="#1f5fa8", linewidth=1, label="observed")
    axes.set_xlabel("iteration after warm-up")
    axes.set_ylabel("seconds")
    axes.set_title(f"{result['device']}: {result['iteration_mape']:.2f} % mean error")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="a100", help="device profile of the emulated clock (default a100)")
    add_time_scale(parser, TIME_SCALE)
    parser.add_argument("--iterations", type=int, default=102, help="iterations to train (default 102)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help=f"iterations to fit on (default {WARM_UP})")
    parser.add_argument("--run-dir", type=Path, help="evaluate this recorded run instead of starting one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result")
    options = parser.parse_args()
    if options.run_dir:
        result = evaluate(options.run_dir, options.warm_up)
    else:
        with tempfile.TemporaryDirectory(prefix="prediction-") as scratch:
            result = evaluate(
                train(options.profile, options.time_scale, options.iterations, Path(scratch)), options.warm_up
            )
    result["device"] = f"emulated clock, {options.profile}" if not options.run_dir else str(options.run_dir)
    result["load_average"] = load_average()
    if options.plot:
        draw(result, options.plot)
    for name, goal in GOALS.items():
        if result[name] > goal:
            print(f"{name} {result[name]:.2f} % is above {goal} %", file=sys.stderr)
    print_result({name: value for name, value in result.items() if name not in ("observed_s", "predicted_s")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
