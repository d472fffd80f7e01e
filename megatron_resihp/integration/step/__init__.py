# SPDX-License-Identifier: Apache-2.0
"""The optimizer step, and the parts and copies of a distributed optimizer."""
