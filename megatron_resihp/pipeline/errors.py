# SPDX-License-Identifier: Apache-2.0
"""The error for an invalid program. Imports nothing."""


class ProgramError(ValueError):
    """A program that cannot run; the message names the op and the rule."""
