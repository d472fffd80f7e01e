"""How fast a plan is with a given health."""

import pytest

from megatron_resihp.cost.device import Device
from megatron_resihp.cost.job import JobCost
from megatron_resihp.cost.layers import model_from_arguments
from megatron_resihp.cost.presets import PRESETS
from megatron_resihp.cost.training import Training
from megatron_resihp.plan import Chunk, ParallelPlan, Replica, Schedule
from megatron_resihp.planner.evaluation import evaluate
from megatron_resihp.planner.health import Health, HealthError

MODEL = model_from_arguments({**PRESETS["llama2-7b"], "num_layers": 6})
COST = JobCost(MODEL, Training(4096, sequence_parallel=True), Device(312e12, 0.5, {1: 1.0, 2: 0.9}), micro_batches=4)
WHOLE = ParallelPlan((Replica(((0,),), (0, 1, 2, 3)),))
PIPELINE = ParallelPlan((Replica(((0, 1), (2, 3)), (0, 1, 2, 3)),))


def healthy(workers: int, **changes: float) -> Health:
    return Health({worker: 1.0 for worker in range(workers)} | {int(name[1:]): p for name, p in changes.items()})


def test_one_device_reaches_the_bound() -> None:
    evaluation = evaluate(WHOLE, healthy(1), COST)
    assert evaluation.iteration_s == pytest.approx(4 * COST.seconds(1).sum())
    assert evaluation.share_of_bound == pytest.approx(1)
    assert evaluation.samples_per_s == pytest.approx(4 / evaluation.iteration_s)


def test_a_stage_is_as_fast_as_its_slowest_member() -> None:
    times = [evaluate(PIPELINE, healthy(4, w0=p, w1=q), COST).iteration_s for p, q in ((0.5, 1), (0.5, 0.5), (1, 1))]
    assert times[0] == times[1] > times[2]


def test_no_plan_beats_the_bound() -> None:
    for speed in (1.0, 0.5):
        assert evaluate(PIPELINE, healthy(4, w3=speed), COST).share_of_bound < 1


def test_a_slow_link_delays_what_goes_over_it() -> None:
    cost = JobCost(MODEL, COST.training, Device(312e12, 0.5, bandwidth=1e9), micro_batches=4)
    slow = Health({worker: 1.0 for worker in range(4)}, {(1, 3): 0.5})
    assert evaluate(PIPELINE, slow, cost).iteration_s > evaluate(PIPELINE, healthy(4), cost).iteration_s


def test_split_backward_fills_bubbles() -> None:
    chunks = (Chunk(0, 0, 4), Chunk(1, 4, 8))
    replicas = [Replica(((0,), (1,)), (0, 1, 2, 3), chunks, Schedule(name)) for name in ("1f1b", "zero-bubble-h1")]
    whole, split = (evaluate(ParallelPlan((each,)), healthy(2), COST).iteration_s for each in replicas)
    assert split < whole


@pytest.mark.parametrize(
    ("speed", "link", "text"),
    [({0: 0.0}, {}, "worker 0 has speed 0"), ({0: 1.5}, {}, "at most 1"), ({0: 1.0}, {(1, 0): 0.5}, "smaller worker")],
)
def test_health_that_cannot_be(speed: dict[int, float], link: dict[tuple[int, int], float], text: str) -> None:
    with pytest.raises(HealthError, match=text):
        Health(speed, link)
