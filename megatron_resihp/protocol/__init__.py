# SPDX-License-Identifier: Apache-2.0
"""What processes of a job tell each other: one frozen dataclass for each message, notice, answer and published record.

`messages` go to the coordinator, `notices` come from it; `published` has what it decides once for all, `answers` what
it tells commands. `planning` is what its process and a planner's tell each other. `wire` writes and reads all of them,
and refuses what is malformed. May import `coding`, `config` and `plan`.
"""
