# SPDX-License-Identifier: Apache-2.0
"""Keeps a Megatron-LM training job running when GPUs die, slow down or come back.

`resihp launch` does all that is needed. A script that starts workers in another way needs, before it uses Megatron:

    import megatron_resihp; megatron_resihp.enable()
"""

import sys

from megatron_resihp.version import __version__

__all__ = ["__version__", "enable"]


def enable() -> None:
    """Make Megatron know the --resihp* flags; without --resihp they do nothing. Calling it again changes nothing.

    With RESIHP_CPU=1 the CPU stand-in is installed first.

    Raises:
        SystemExit: if torch or Megatron is missing, Megatron is not of a supported version, or --resihp is given and
            there is no CUDA device.
    """
    from megatron_resihp.extras import TRAIN, missing

    if problem := missing(tuple(TRAIN)):
        sys.exit(f"resihp: {problem}")
    from megatron_resihp.integration.enable import enable as enable_integration

    enable_integration()
