# SPDX-License-Identifier: Apache-2.0
"""Help texts of Megatron's flags, which it makes from the sources of its classes whenever it makes a parser: most of
the time that this takes. May import megatron, but only in its function.
"""

from __future__ import annotations


def keep_help_texts() -> None:
    """Make each only once in this process, and in those that are forked from it."""
    from functools import cache

    from megatron.training.argument_utils import ArgumentGroupFactory

    read_sources = ArgumentGroupFactory._get_field_docstrings
    any_factory = object.__new__(ArgumentGroupFactory)
    remembered = cache(lambda described: read_sources(any_factory, described))
    ArgumentGroupFactory._get_field_docstrings = lambda _, described: remembered(described)
