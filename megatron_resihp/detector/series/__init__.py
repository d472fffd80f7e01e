# SPDX-License-Identifier: Apache-2.0
"""Levels of single series that have no peers to be compared with: a job's iteration time, a worker alone in its stage.

Pure functions of numbers; imports numpy, scipy and `detector`.
"""
