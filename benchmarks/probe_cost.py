# SPDX-License-Identifier: Apache-2.0
"""The cost of probes in the training thread: Megatron's seams, wrapped and unwrapped in turns, around the same work.

For `overhead.py`. One worker in the middle of a pipeline: for each micro-batch it receives, runs forward, sends,
receives a gradient, runs backward and sends. Imports torch, megatron and `megatron_resihp.integration`, after the CPU
stand-in where there is no GPU.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_resihp import cpu

MICRO_BATCHES = 8
LAYERS = 4
COLLECTIVES = 2 * LAYERS
"""Collectives of a tensor-parallel group in each op: two for each layer."""
BROADCASTS = 5
"""Tensors of a micro-batch."""
WARM_UP, ROUNDS = 20, 200
HIDDEN = 4096
"""Tokens of a micro-batch, and width of a layer, on a GPU."""
FORWARD_PRODUCTS = 12
"""Products of square matrices in a layer's forward pass: 4 for attention, 8 for the MLP. Its backward pass has twice as
many."""


class Worker:
    """The seams of one worker, and the loop that a schedule runs over them.

    Args:
        wrapped: whether the probes are in between.
        work: runs this many products of a layer.
    """

    def __init__(self, wrapped: bool, work: Callable[[int], None]) -> None:
        from megatron_resihp.control.worker.heard import Heard
        from megatron_resihp.integration.probes import patches
        from megatron_resihp.integration.probes.probe_clock import make_clock
        from megatron_resihp.integration.probes.probes import Probes
        from megatron_resihp.plan import ParallelPlan, Replica

        self.probes = Probes(0, make_clock, lambda sheet: None)
        self.probes.ops.tp_group = object()
        args = SimpleNamespace(dataloader_inter_document_masking=False, sft=False, micro_batch_size=1, seq_length=1)
        pads = SimpleNamespace(pad_op=None, pad_transfer=None)
        self._runtime: Any = SimpleNamespace(
            probes=self.probes, job=SimpleNamespace(args=args), pads=pads,
            view=SimpleNamespace(plan=ParallelPlan((Replica(((0,),), (0,)),)), replica=0),
            control=SimpleNamespace(heard=Heard(0, lambda: None, 0)),
        )  # fmt: skip
        self._wrapped = wrapped
        self._work = work
        self._tensors = _tensors(6)

        def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return getattr(patches, f"wrap_{name}")(self._runtime, function) if wrapped else function

        self._collective = wrap("collective", lambda tensor, group=None: None)
        self._broadcast = wrap("broadcast", lambda tensor, rank, group=None: None)
        self._p2p = wrap("p2p_ops", lambda **tensors: [_Request() for t in tensors.values() if hasattr(t, "numel")])
        self._forward = wrap("forward_step", self._plain_forward)
        self._backward = wrap("backward_step", self._plain_backward)

    def iterate(self, iteration: int) -> None:
        """One iteration."""
        if self._wrapped:
            self.probes.begin(0, iteration, tuple(range(MICRO_BATCHES)), (0, 1, 2))
        arrived, output, gradient, left = self._tensors[:4]
        outputs = []
        for number in range(MICRO_BATCHES):
            self._transfer(recv_prev=arrived)
            made = self._forward(None, None, None, MICRO_BATCHES, [arrived], current_microbatch=number)[0]
            outputs.append(made)
            self._transfer(send_next=output)
        for made in outputs:
            self._transfer(recv_next=gradient)
            self._backward([arrived], made, [gradient], None)
            self._transfer(send_prev=left)
        if self._wrapped:
            _synchronize()
            self.probes.synchronized()
            self.probes.finish()

    def _transfer(self, **tensors: Any) -> None:
        found = {f"tensor_{name}": tensors.get(name) for name in ("send_prev", "recv_prev", "send_next", "recv_next")}
        for request in self._p2p(group=None, prev_pipeline_rank=1, next_pipeline_rank=2, **found):
            request.wait()

    def _plain_forward(self, *_: Any, **__: Any) -> Any:
        for _number in range(BROADCASTS):
            self._broadcast(self._tensors[0], 0, group=self.probes.ops.tp_group)
        self._run_op(FORWARD_PRODUCTS)
        return [self._tensors[1]], None

    def _plain_backward(self, *_: Any) -> Any:
        self._run_op(2 * FORWARD_PRODUCTS)
        return [self._tensors[3]]

    def _run_op(self, products: int) -> None:
        for _ in range(COLLECTIVES):
            self._collective(None, group=self.probes.ops.tp_group)
        self._work(LAYERS * products)


class _Request:
    def wait(self) -> None:
        pass


def measure_probes() -> dict[str, Any]:
    """Microseconds that probes cost the training thread for each op and, on a GPU, the share of an iteration."""
    cpu.install()
    on_gpu = not cpu.installed()
    work = _gpu_work() if on_gpu else _no_work
    workers = {wrapped: Worker(wrapped, work) for wrapped in (False, True)}
    host: dict[bool, list[float]] = {False: [], True: []}
    whole: dict[bool, list[float]] = {False: [], True: []}
    for iteration in range(1, WARM_UP + ROUNDS + 1):
        for wrapped, worker in workers.items():
            _synchronize()
            began, thread_began = time.perf_counter(), time.thread_time()
            worker.iterate(iteration)
            thread_ended = time.thread_time()
            _synchronize()
            if iteration > WARM_UP:
                host[wrapped].append(thread_ended - thread_began)
                whole[wrapped].append(time.perf_counter() - began)
    spent = statistics.median(host[True]) - statistics.median(host[False])
    result: dict[str, Any] = {
        "probe_us_per_op": 1e6 * spent / (2 * MICRO_BATCHES),
        "transfers_per_op": 2,
        "collectives_per_op": COLLECTIVES,
        "overhead_percent": None,
    }
    if on_gpu:
        before, after = statistics.median(whole[False]), statistics.median(whole[True])
        result["overhead_percent"] = 100 * (after - before) / before
    else:
        result["overhead_percent_reason"] = "no GPU here; on a CPU it would say how small the model is"
    return result


def _no_work(products: int) -> None:
    pass


def _gpu_work() -> Callable[[int], None]:
    import torch

    left = torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def work(products: int) -> None:
        for _ in range(products):
            torch.matmul(left, left)

    return work


def _tensors(count: int) -> list[Any]:
    import torch

    return [torch.empty(8) for _ in range(count)]


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
