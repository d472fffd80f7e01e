# SPDX-License-Identifier: Apache-2.0
"""A running job: its event log and what the terminal shows."""
