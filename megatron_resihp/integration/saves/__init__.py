# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a process of their own writes while training goes on."""
