# SPDX-License-Identifier: Apache-2.0
"""Whether Megatron would make its model's configuration of a job's arguments. May import megatron.

Every worker's script makes it before anything else, so what it asserts would end all of them.
"""

import copy
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import moe_utils
from megatron.training.arguments import core_transformer_config_from_args

from megatron_resihp.config import ConfigError

RULES: Final = (AssertionError, ValueError, NotImplementedError, ArithmeticError)
"""What Megatron raises of arguments that it doesn't take. Other errors may be of this machine's."""


def check_model(args: Any) -> None:
    """Make the configuration of validated arguments, and let go of it.

    Raises:
        ConfigError: it can't be made on any machine.
    """
    try:
        with _everything_installed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            core_transformer_config_from_args(copy.deepcopy(args))
    except RULES as error:
        raise refusal(error) from error
    except Exception:
        # A file, a device or a library that may be there where workers run.
        return


def refusal(error: BaseException) -> ConfigError:
    """What Megatron asserts, in one line instead of a traceback."""
    rule = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
    return ConfigError(f"Megatron refuses these flags: {' '.join(rule.split())}; change what it names")


@contextmanager
def _everything_installed() -> Iterator[None]:
    """Let the configuration find the libraries and devices that it looks for, which a login node need not have."""
    wanted = (
        (transformer_config, "is_te_min_version"),
        (transformer_config, "_validate_dsa_kernel_backend_dependencies"),
        *((module, name) for module in (rope_utils, moe_utils) for name in vars(module) if name.startswith("fused_")),
    )
    own = [(module, name, getattr(module, name)) for module, name in wanted if hasattr(module, name)]
    for module, name, _ in own:
        setattr(module, name, _found)
    try:
        yield
    finally:
        for module, name, value in own:
            setattr(module, name, value)


def _found(*_: Any, **__: Any) -> bool:
    """Stands for a kernel, which is not called, or for what looks for one."""
    return True
