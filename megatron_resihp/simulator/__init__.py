# SPDX-License-Identifier: Apache-2.0
"""What if: a cluster whose workers die, slow down and come back, and what each strategy makes of it.

Imports numpy, `plan`, `pipeline`, `cost` and `planner`.
"""
