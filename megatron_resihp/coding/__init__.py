# SPDX-License-Identifier: Apache-2.0
"""Dataclasses to plain JSON values and back, as their annotations say: for what travels and for what lies in files.

JSON has a row for a tuple, a NamedTuple, a list, a set, or a mapping whose keys are tuples, an object for a dataclass
or another mapping, and a name for an enum's member. A type may have a form of its own (`forms`). May import the
standard library.
"""

from megatron_resihp.coding.decoding import EXACT, FILE, Tolerance, decode, repeated_fields, version_said
from megatron_resihp.coding.encoding import encode, encode_as
from megatron_resihp.coding.errors import MissingFieldError, WrongValueError, shown
from megatron_resihp.coding.forms import Form, omitted_if, set_form
from megatron_resihp.coding.rules import Between, Holds, Matches, Repeated, Rule

__all__ = [
    "EXACT", "FILE", "Between", "Form", "Holds", "Matches", "MissingFieldError", "Repeated", "Rule", "Tolerance",
    "WrongValueError", "decode", "encode", "encode_as", "omitted_if", "repeated_fields", "set_form", "shown",
    "version_said",
]  # fmt: skip
