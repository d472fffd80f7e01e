# SPDX-License-Identifier: Apache-2.0
"""Levels of single series without peers to compare with: a job's iteration time, a worker alone in its stage.

Pure functions of numbers; imports numpy, scipy and `detector`.
"""
