# SPDX-License-Identifier: Apache-2.0
"""Simulates a cluster whose workers die, slow down and come back, and how each strategy handles that.

Imports numpy, `plan`, `pipeline`, `cost` and `planner`.
"""
