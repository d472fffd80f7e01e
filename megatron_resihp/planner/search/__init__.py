# SPDX-License-Identifier: Apache-2.0
"""The parts of `planner.strategies.joint`: one subject in each file, loops compiled. See there for how they fit."""
