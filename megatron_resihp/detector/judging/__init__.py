# SPDX-License-Identifier: Apache-2.0
"""Judges an iteration: what it should have taken, how noisy that is, and whether a level has risen."""
