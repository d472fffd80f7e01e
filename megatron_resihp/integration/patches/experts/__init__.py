# SPDX-License-Identifier: Apache-2.0
"""Patches of what mixtures of experts do: which tokens they get, and what they report of it."""
