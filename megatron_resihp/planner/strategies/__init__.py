# SPDX-License-Identifier: Apache-2.0
"""One module for each strategy, all with one signature. Imports what the planner may import."""
