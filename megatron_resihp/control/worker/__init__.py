# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the control plane: what it tells the coordinator, and what it hears.

Workers that have lost the coordinator agree here on what they save.
"""
