# SPDX-License-Identifier: Apache-2.0
"""Patches: where a job that draws random numbers changes from stream to stream. A job that draws none has none.

Replaces forward_step of megatron.core.pipeline_parallel.schedules, which both kinds of plans call for each micro-batch
and chunk, and what is called in its place where experts' communication is overlapped. Replaces what the forward passes
of transformer layers and of what predicts further tokens begin with, and get_forward_backward_func. May import megatron
and this package.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_resihp.integration.job import Job
from megatron_resihp.integration.patch import Patch
from megatron_resihp.integration.runtime import Runtime
from megatron_resihp.integration.streams.generators import Generators
from megatron_resihp.integration.streams.seeds import draws, predicting_layer


def stream_patches(runtime: Runtime) -> list[Patch]:
    """Those that one worker needs."""
    return patches_of(runtime) if has_own_streams(runtime.job) else []


def has_own_streams(job: Job) -> bool:
    """Whether there is anything to draw, and not by Megatron's own streams."""
    return draws(job.args) and not job.config.resihp_megatron_random_streams


def patches_of(runtime: Runtime) -> list[Patch]:
    """All of them."""
    generators = Generators(runtime.job.args.seed)
    return [
        Patch(
            "megatron.core.pipeline_parallel.schedules:forward_step",
            functools.partial(wrap_forward_step, runtime, generators),
            ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
            "gives each micro-batch its random streams",
        ),
        Patch(
            "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step",
            functools.partial(wrap_combined_step, runtime, generators),
            ("forward_step_func", "data_iterator", "f_model"),
            "gives each micro-batch its random streams",
        ),
        Patch(
            "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
            functools.partial(wrap_layer, generators),
            ("self", "hidden_states"),
            "gives each layer its random streams",
        ),
        Patch(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._get_embeddings",
            functools.partial(wrap_prediction, generators),
            ("self", "input_ids"),
            "gives what predicts a further token random streams",
        ),
        Patch(
            "megatron.training.training:get_forward_backward_func",
            functools.partial(wrap_get_forward_backward_func, generators),
            None,
            "leaves Megatron's tracker as it was",
        ),
    ]


def wrap_forward_step(runtime: Runtime, generators: Generators, original: Callable[..., Any]) -> Callable[..., Any]:
    """forward_step that begins with the micro-batch's own streams."""

    @functools.wraps(original)
    def forward_step(
        forward_step_func: Any, data_iterator: Any, model: Any, *positional: Any, current_microbatch: int,
        **options: Any,
    ) -> Any:  # fmt: skip
        _begin(runtime, generators, model, current_microbatch)
        return original(
            forward_step_func, data_iterator, model, *positional, current_microbatch=current_microbatch, **options
        )

    return forward_step


def wrap_combined_step(runtime: Runtime, generators: Generators, original: Callable[..., Any]) -> Callable[..., Any]:
    """combined_forward_backward_step that begins with the streams of the micro-batch that it runs forwards, if any. The
    backward pass beside it draws nothing: recomputation puts back the streams that it finds."""

    @functools.wraps(original)
    def combined_forward_backward_step(
        forward_step_func: Any, data_iterator: Any, f_model: Any, *positional: Any, **options: Any
    ) -> Any:
        if f_model is not None:
            _begin(runtime, generators, f_model, options["current_microbatch"])
        return original(forward_step_func, data_iterator, f_model, *positional, **options)

    return combined_forward_backward_step


def _begin(runtime: Runtime, generators: Generators, model: Any, current_microbatch: int) -> None:
    if model.training:
        generators.begin_op(runtime.progress.iteration, runtime.view.numbering[current_microbatch])


def wrap_layer(generators: Generators, original: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's attention, which is the first part of its forward pass, with the layer's own streams from there on."""

    @functools.wraps(original)
    def _forward_attention(layer: Any, *positional: Any, **options: Any) -> Any:
        if layer.training:
            number = layer.layer_number
            if layer.is_mtp_layer:  # Megatron counts these from 1, too
                number = predicting_layer(layer.config.num_layers, number).inner
            generators.begin_layer(number, sliced=layer.config.sequence_parallel)
        return original(layer, *positional, **options)

    return _forward_attention


def wrap_prediction(generators: Generators, original: Callable[..., Any]) -> Callable[..., Any]:
    """How what predicts a further token embeds tokens, before its layer begins."""

    @functools.wraps(original)
    def _get_embeddings(layer: Any, *positional: Any, **options: Any) -> Any:
        if layer.training:
            number = predicting_layer(layer.config.num_layers, layer.layer_number).embedding
            generators.begin_layer(number, sliced=False)
        return original(layer, *positional, **options)

    return _get_embeddings


def wrap_get_forward_backward_func(generators: Generators, original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule after which no micro-batch is being computed: checkpoints hold what Megatron's own would."""

    @functools.wraps(original)
    def get_forward_backward_func(*positional: Any, **options: Any) -> Callable[..., Any]:
        schedule = original(*positional, **options)

        def run(**call: Any) -> Any:
            try:
                return schedule(**call)
            finally:
                generators.end_ops()

        return run

    return get_forward_backward_func
