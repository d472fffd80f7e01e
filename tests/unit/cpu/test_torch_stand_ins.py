# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for torch's device functions, called directly: nothing is installed in the test process."""

from types import SimpleNamespace

import pytest
import torch

from megatron_resihp.cpu.factories import _moving_to_cpu, _naming_cuda, is_cuda, on_cpu
from megatron_resihp.cpu.norms import build_norm
from megatron_resihp.cpu.torch_cuda import Event, Stream, _memory_stats


@pytest.mark.parametrize("device", [0, 3, "cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 2)])
def test_cuda_devices_are_recognized(device):
    assert is_cuda(device)


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("cpu"), torch.float32, torch.zeros(1)])
def test_other_values_are_not_devices(device):
    assert not is_cuda(device)


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda:0"), None])
def test_factories_stay_on_the_cpu(device):
    tensor = on_cpu(torch.zeros)(2, 3, device=device, dtype=torch.int64, pin_memory=True)
    assert (tensor.device.type, tensor.dtype, tuple(tensor.shape)) == ("cpu", torch.int64, (2, 3))


def test_factories_leave_other_devices_alone():
    assert on_cpu(torch.empty)(2, device="meta").device.type == "meta"


def test_moving_keeps_dtype_arguments():
    move = _moving_to_cpu(torch.Tensor.to)
    tensor = torch.zeros(2)
    assert move(tensor, "cuda:0", torch.float64, non_blocking=True).dtype == torch.float64
    assert move(tensor, device=0, dtype=torch.int32).dtype == torch.int32
    assert move(tensor, torch.bfloat16).dtype == torch.bfloat16
    assert move(tensor, "meta").device.type == "meta"


def test_types_are_named_as_on_a_gpu():
    type_of = _naming_cuda(torch.Tensor.type)
    assert type_of(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert type_of(torch.zeros(1), "torch.cuda.LongTensor").dtype == torch.int64
    assert type_of(torch.zeros(1), torch.float64).dtype == torch.float64


def test_events_measure_milliseconds():
    start, end = Event(enable_timing=True), Stream().record_event()
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    assert start.elapsed_time(end) <= 0 <= end.elapsed_time(start)
    assert start.query()


def test_memory_statistics_are_the_process_memory():
    statistics = _memory_stats()
    assert 0 < statistics["allocated_bytes.all.current"] <= statistics["allocated_bytes.all.peak"]
    assert statistics["num_alloc_retries"] == 0


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_mark_their_parameters_for_sequence_parallelism(normalization, sequence_parallel):
    config = SimpleNamespace(
        normalization=normalization, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=False
    )
    norm = build_norm(object, config, hidden_size=8, eps=1e-6)
    assert type(norm).__name__ == normalization
    assert norm.eps == 1e-6
    assert {parameter.sequence_parallel for parameter in norm.parameters()} == {sequence_parallel}


def test_norms_without_a_counterpart_are_refused():
    config = SimpleNamespace(normalization="L2Norm", sequence_parallel=False, layernorm_zero_centered_gamma=False)
    with pytest.raises(NotImplementedError, match="L2Norm"):
        build_norm(object, config, hidden_size=8)
