# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for torch's device functions, called directly: nothing is installed in the test process."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_resihp.cpu.distributed import _all_gather, _all_to_all_single, _reduce_scatter
from megatron_resihp.cpu.factories import _moving_to_cpu, _naming_cuda, is_cuda, on_cpu
from megatron_resihp.cpu.megatron_parts import _accepting_head_sizes, weight_gradient_kernels
from megatron_resihp.cpu.norms import build_norm
from megatron_resihp.cpu.recomputation import refill
from megatron_resihp.cpu.torch_cuda import PROFILER, Event, Stream, _memory_stats, _no_ranges


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
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        fp32_residual_connection=False,
        layernorm_zero_centered_gamma=False,
    )
    norm = build_norm(object, config, hidden_size=8, eps=1e-6)
    assert type(norm).__name__ == normalization
    assert norm.eps == 1e-6
    assert {parameter.sequence_parallel for parameter in norm.parameters()} == {sequence_parallel}


def test_norms_take_wide_residuals_and_give_what_the_next_layer_takes():
    config = SimpleNamespace(
        normalization="RMSNorm",
        sequence_parallel=False,
        fp32_residual_connection=True,
        layernorm_zero_centered_gamma=False,
    )
    norm = build_norm(object, config, hidden_size=8).bfloat16()
    assert norm(torch.randn(3, 8)).dtype is torch.bfloat16


def test_norms_without_a_counterpart_are_refused():
    config = SimpleNamespace(
        normalization="L2Norm",
        sequence_parallel=False,
        fp32_residual_connection=False,
        layernorm_zero_centered_gamma=False,
    )
    with pytest.raises(NotImplementedError, match="L2Norm"):
        build_norm(object, config, hidden_size=8)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_with_gains_around_zero_compute_the_same(normalization):
    torch.manual_seed(0)
    inputs = torch.randn(3, 8, dtype=torch.float64)
    norms = [
        build_norm(
            object,
            SimpleNamespace(
                normalization=normalization,
                sequence_parallel=False,
                fp32_residual_connection=False,
                layernorm_zero_centered_gamma=centered,
            ),
            hidden_size=8,
        ).double()
        for centered in (False, True)
    ]
    torch.testing.assert_close(norms[0](inputs), norms[1](inputs))
    gains = torch.randn(8, dtype=torch.float64)
    for norm, offset in zip(norms, (0.0, 1.0), strict=True):
        with torch.no_grad():
            norm.weight.copy_(gains - offset)
    torch.testing.assert_close(norms[0](inputs), norms[1](inputs))


def test_gpu_profilers_have_nothing_to_listen_to():
    assert PROFILER["check_error"](PROFILER["cudart"]().cudaProfilerStart()) is None
    with _no_ranges(record_shapes=True) as context:
        assert context is None


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_of_unequal_sizes_are_gathered(async_op):
    """Of two members whose parts have 3 and 1 numbers; gloo's own gather sees equal ones."""
    parts = [torch.arange(3.0), torch.tensor([7.0])]

    def gather_equal(outputs, tensor, group, in_background):
        for output, part in zip(outputs, parts, strict=True):
            assert output.shape == tensor.shape
            output[: part.numel()] = part
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True) if in_background else None

    outputs = [torch.empty(3), torch.empty(1)]
    work = _all_gather(gather_equal)(outputs, parts[1], async_op=async_op)
    assert (work is not None) == async_op and (work is None or work.wait())
    assert [output.tolist() for output in outputs] == [part.tolist() for part in parts]


def test_parts_of_unequal_sizes_are_summed_and_scattered():
    """The second of two members gets 1 number, the first one 3; gloo's own sum sees equal parts."""
    parts = [torch.arange(3.0), torch.tensor([7.0])]

    def sum_equal(output, inputs, group=None):
        assert {part.shape for part in inputs} == {output.shape}
        output.copy_(2 * inputs[1])

    output = torch.empty(1)
    assert _reduce_scatter(sum_equal)(output, parts, group=None) is None
    assert output.tolist() == [14.0]


def test_heads_may_have_keys_and_values_of_other_sizes():
    """Latent attention: 4 heads of 8 in the model, keys of 24, values of 16, on one of two tensor-parallel ranks."""

    class Attention(DotProductAttention):
        __init__ = _accepting_head_sizes(DotProductAttention.__init__)

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    ranks = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2))
    plain, latent = (
        Attention(config, 1, AttnMaskType.causal, "self", pg_collection=ranks, **channels)
        for channels in ({}, {"k_channels": 24, "v_channels": 16})
    )
    assert (plain.hidden_size_per_partition, latent.hidden_size_per_partition) == (16, 32)
    assert (plain.softmax_scale, latent.softmax_scale) == (pytest.approx(8**-0.5), pytest.approx(24**-0.5))


def test_split_sizes_may_be_arrays():
    seen = []
    exchange = _all_to_all_single(lambda *arguments, **options: seen.append(arguments[2:]))
    tensor = torch.zeros(3)
    exchange(tensor, tensor, torch.tensor([1, 2]).numpy(), torch.tensor([2, 1]), group=None)
    exchange(tensor, tensor)
    assert seen == [([1, 2], [2, 1]), (None, None)]


@pytest.mark.parametrize("width", ["fp32", "fp16"])
def test_weight_gradients_are_added_to_what_is_there(width):
    given, gradient, total = torch.randn(5, 3), torch.randn(5, 2), torch.ones(2, 3)
    getattr(weight_gradient_kernels(), f"wgrad_gemm_accum_{width}")(given, gradient, total)
    torch.testing.assert_close(total, 1 + gradient.t() @ given)


def test_an_output_whose_memory_was_freed_gets_its_numbers_back():
    """Views of it see them too, and autograd has not noticed."""
    output = torch.arange(6.0)
    view, again, version = output.view(2, 3), torch.arange(6.0), output._version
    output.untyped_storage().resize_(0)
    refill(output, again)
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and output._version == version
