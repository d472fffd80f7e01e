# SPDX-License-Identifier: Apache-2.0
"""The events of a run: a class for each, the bus that tells of them, and the log that keeps them.

Imports nothing of this package.
"""
