# SPDX-License-Identifier: Apache-2.0
"""What of Megatron is known to work with --resihp, argument by argument, and why: a table that tests hold.

An argument that differs from Megatron's default and is not in it is refused: it may change state, groups or the
schedule in a way that recovery does not know. `python -m megatron_resihp.integration.support.page` prints the table as
docs/megatron-flags.md. All but that module can be imported without torch and Megatron.
"""

from megatron_resihp.integration.support.lacking import LACKING
from megatron_resihp.integration.support.row import Evidence, Needs, Only, Row
from megatron_resihp.integration.support.table import GIVEN_UP, SUBJECTS, SUPPORTED, TABLE, refusals

__all__ = ["GIVEN_UP", "LACKING", "SUBJECTS", "SUPPORTED", "TABLE", "Evidence", "Needs", "Only", "Row", "refusals"]
