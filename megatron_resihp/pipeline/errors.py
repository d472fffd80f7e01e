# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a program. Imports nothing."""


class ProgramError(ValueError):
    """A program that can't be run; the message names the op and the rule."""
