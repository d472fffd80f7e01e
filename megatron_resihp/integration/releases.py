# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of megatron-core that the patches fit: a table with a row for each release.

Code asks the row of the installed release and compares no versions. Imports megatron's version only, when asked.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Parameters = tuple[str, ...]
TRY: Final = "RESIHP_TRY_MEGATRON"
"""The environment variable with which tests use a release that is not let in yet."""


@dataclass(frozen=True)
class Release:
    """One release, with all of its patch releases.

    Attributes:
        name: major and minor version.
        checkout: the tag of Megatron-LM to take where that is used instead of the package.
        let_in: whether all daily tests have passed on it; otherwise jobs are refused.
        set_up: the parameters of training.setup_model_and_optimizer.
        builders: the functions that build a worker's chunks, by module and name, and their first parameters.
        norm_gradients: the optimizer's method that lists the gradients which a worker counts.
        prediction_metrics: what is summed of predictions of further tokens, by its name in Megatron's tracker: losses,
            then counts.
        quantile_balancing: the functions that change routers' biases by quantiles, as `builders` are said.
    """

    name: str
    checkout: str
    let_in: bool
    set_up: Parameters
    builders: Mapping[str, Parameters]
    norm_gradients: str
    prediction_metrics: tuple[str, ...]
    quantile_balancing: Mapping[str, Parameters]

    @property
    def configures_models(self) -> bool:
        """Whether pretrain() takes a model's configuration; otherwise it takes a function that builds the model."""
        return "cfg_container" in self.set_up

    @property
    def set_up_takes_groups(self) -> bool:
        """Whether set-up is handed the groups of a model; otherwise it looks up the present ones."""
        return "pg_collection" in self.set_up


_GET_MODEL: Final[Mapping[str, Parameters]] = {
    "megatron.training.training:get_model": (
        "model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection",
    )
}  # fmt: skip
_GPT_BUILDER: Final[Mapping[str, Parameters]] = {
    "megatron.training.models.gpt:GPTModelBuilder.build_distributed_models": ("self", "pg_collection")
}

RELEASES: Final[Mapping[tuple[int, int], Release]] = {
    (0, 18): Release(
        "0.18",
        "core_v0.18.2",
        True,
        ("model_provider_func", "model_type", "checkpointing_context"),
        _GET_MODEL,
        "get_main_grads_for_grad_norm",
        ("values",),
        {},
    ),
    (0, 19): Release(
        "0.19",
        "core_v0.19.0",
        True,
        ("model_type", "model_provider_func", "checkpointing_context", "cfg_container", "pg_collection"),
        {**_GET_MODEL, **_GPT_BUILDER},
        "get_grads_for_grad_norm",
        ("loss_values", "correct_values", "total_values"),
        {"megatron.core.distributed.finalize_model_grads:_update_router_qb_beta": ("model", "config", "dp_cp_group")},
    ),
}
"""By major and minor version, oldest first."""


def installed() -> Release | None:
    """The row of the megatron-core that is imported here; None: it is not supported."""
    from megatron.core.package_info import MAJOR, MINOR

    return row_of((MAJOR, MINOR))


def row_of(numbers: tuple[int, int] | None) -> Release | None:
    """The row of a major and minor version; None: it is not supported."""
    release = RELEASES.get(numbers) if numbers else None
    return release if release and (release.let_in or os.environ.get(TRY) == "1") else None


def current() -> Release:
    """The same where enable() has seen that it is supported."""
    release = installed()
    assert release is not None, "enable() has looked"
    return release


def supported() -> str:
    """All of them, for a message."""
    return " or ".join(release.name for release in RELEASES.values() if release.let_in)


def requirement() -> str:
    """All of them, as pip is told."""
    versions = [version for version, release in RELEASES.items() if release.let_in]
    (oldest, first), (newest, last) = min(versions), max(versions)
    return f"megatron-core>={oldest}.{first},<{newest}.{last + 1}"
