# SPDX-License-Identifier: Apache-2.0
"""A running job: its event log and its output on the terminal."""
