# SPDX-License-Identifier: Apache-2.0
"""The parts of `planner.strategies.joint`, which says how they fit together; one subject per file, compiled loops."""
