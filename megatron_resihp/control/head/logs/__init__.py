# SPDX-License-Identifier: Apache-2.0
"""Megatron's log, written on node 0 whichever worker logs. May import `protocol`, `events` and this package."""
