# SPDX-License-Identifier: Apache-2.0
"""One module for each way to plan, all of one signature. Imports what the planner may."""
