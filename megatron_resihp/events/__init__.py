# SPDX-License-Identifier: Apache-2.0
"""The run's event log: what every event holds, one writer and one reader.

Imports nothing of this package.
"""
