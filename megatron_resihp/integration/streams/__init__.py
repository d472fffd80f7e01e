# SPDX-License-Identifier: Apache-2.0
"""Dropout masks and other noise that depend on what is computed, and not on where or how often."""
