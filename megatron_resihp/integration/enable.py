# SPDX-License-Identifier: Apache-2.0
"""What `megatron_resihp.enable()` does: the flags at once, everything else when --resihp turns out to be given.

May import everything; megatron only inside functions, after the CPU stand-in is in place.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable

from megatron_resihp import cpu
from megatron_resihp.config import ResihpConfig
from megatron_resihp.control.node.bootstrap import leave_to_agent
from megatron_resihp.control.worker.identity import Identity, UnlikeError
from megatron_resihp.integration import releases
from megatron_resihp.integration.failing import fail
from megatron_resihp.integration.patch import Patch, PatchError, apply_all
from megatron_resihp.integration.patches.arguments.derived_arguments import DerivedArguments
from megatron_resihp.integration.tree import Tree, found

_enabled = False


def enable() -> None:
    """Put the flags in place, once."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    if problem := version_problem():
        fail(problem)
    try:
        if os.environ.get("RESIHP_CPU") == "1":
            cpu.install(force=True)
        from megatron_resihp.integration.patches.arguments.checkpoint_arguments import wrap_load_args_from_checkpoint
        from megatron_resihp.integration.patches.arguments.flags import (
            YAML,
            make_wrap_validate_args,
            reads_yaml,
            wrap_add_megatron_arguments,
        )
    except ImportError as error:
        fail(mismatch(error))
    if problem := _device_problem():
        fail(problem)
    if reads_yaml(sys.argv):
        fail(YAML)
    arguments = "megatron.training.arguments"
    patches = [
        Patch(f"{arguments}:add_megatron_arguments", wrap_add_megatron_arguments, ("parser",), "adds --resihp*"),
        Patch(f"{arguments}:validate_args", make_wrap_validate_args(_switch_on), ("args", "defaults"), "checks them"),
        Patch(
            "megatron.training.checkpointing:load_args_from_checkpoint", wrap_load_args_from_checkpoint, ("args",),
            "tells what is given from what a checkpoint adds",
        ),
    ]  # fmt: skip
    try:
        apply_all(patches)
    except PatchError as error:
        fail(mismatch(error))


def _device_problem() -> str | None:
    import torch

    # Without the plugin it is Megatron's to say.
    if "--resihp" not in sys.argv or cpu.installed() or torch.cuda.is_available():
        return None
    return (
        "this process sees no CUDA device; check CUDA_VISIBLE_DEVICES and the driver, or train on CPUs with "
        "`resihp launch --stand-in`"
    )


def version_problem(tree: Tree | None = None) -> str | None:
    """Why the Megatron of this process can't be patched, by its version; None: it can, or there is none.

    Args:
        tree: that one; None: it is looked for.
    """
    tree = tree or found()
    if tree is None or releases.row_of(tree.numbers) is not None:
        return None
    return f"megatron-core {tree} is not supported; install {releases.requirement()} {_checkout()}"


def mismatch(error: ImportError | PatchError) -> str:
    """What to say of a Megatron that isn't there, or calls itself supported and lacks what the patches or its own
    modules need."""
    if found() is None and isinstance(error, ImportError) and error.name in ("megatron", "megatron.core"):
        return f"no megatron-core can be imported: {error}; install {releases.requirement()} {_checkout()}"
    lacking = error.name if isinstance(error, ImportError) else None
    if lacking and lacking.partition(".")[0] not in ("megatron", __name__.partition(".")[0]):
        cause = f"Megatron ({found()}) can't be imported: {error}"
        return f"{cause}; install {lacking}, or use megatron-core {releases.supported()} {_checkout()}"
    cause = f"this Megatron ({found()}) is not what the patches were written for: {error}"
    return f"{cause}; use megatron-core {releases.supported()} {_checkout()}"


def _checkout() -> str:
    *_, newest = releases.RELEASES.values()
    return f"or, if the script is in a checkout of Megatron-LM, check out {newest.checkout}"


def _switch_on(config: ResihpConfig, derived: DerivedArguments, identify: Callable[[], Identity]) -> None:
    """Called by Megatron's argument validation: the plugin connects when start-up reaches initialize_megatron."""
    if "RESIHP_STORE" not in os.environ:
        fail("--resihp needs the control plane; start the job with `resihp launch`")
    leave_to_agent(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    patch = Patch(
        "megatron.training.training:initialize_megatron",
        functools.partial(_first_initialize, config, derived, identify),
        ("allow_no_cuda", "skip_mpu_initialization", "get_embedding_ranks", "get_position_embedding_ranks", "store"),
        "joins the world through the control plane's store",
    )
    try:
        apply_all([patch, *writer_patches()])
    except PatchError as error:
        fail(mismatch(error))


def writer_patches() -> list[Patch]:
    """Megatron opens its log's writers once, on the rank that is the last one then; node 0 writes for all epochs."""
    module = "megatron.training.global_vars"
    return [
        Patch(f"{module}:_set_tensorboard_writer", _open_none, ("args",), "node 0 writes the log"),
        Patch(f"{module}:_set_wandb_writer", _open_none, ("args",), "node 0 writes the log"),
        Patch(f"{module}:_set_one_logger", _open_none, ("args",), "is for one rank of a whole job"),
    ]


def _open_none(original: Callable[..., None]) -> Callable[..., None]:
    return lambda args: None


def _first_initialize(config: ResihpConfig, derived: DerivedArguments, identify: Callable[[], Identity], original):  # type: ignore[no-untyped-def]
    """initialize_megatron that connects, applies all other patches, and goes on."""

    @functools.wraps(original)
    def initialize_megatron(*positional, **options):  # type: ignore[no-untyped-def]
        from megatron_resihp.integration.patches.experts.additional_rounds import round_patches
        from megatron_resihp.integration.patches.experts.uneven import uneven_patches
        from megatron_resihp.integration.patches.startup import create_runtime, wrap_initialize_megatron
        from megatron_resihp.integration.patches.training import training_patches
        from megatron_resihp.integration.probes.injection_points import injection_patches
        from megatron_resihp.integration.probes.patches import probe_patches
        from megatron_resihp.integration.streams.patches import stream_patches

        try:
            runtime = create_runtime(config, derived, identify)
        except UnlikeError as error:
            fail(str(error))
        try:
            apply_all(
                training_patches(runtime, releases.current())
                + probe_patches(runtime)
                + injection_patches(runtime)
                + stream_patches(runtime)
                + round_patches(runtime)
                + uneven_patches(runtime)
            )
        except PatchError as error:
            fail(mismatch(error))
        return wrap_initialize_megatron(runtime, original)(*positional, **options)

    return initialize_megatron
