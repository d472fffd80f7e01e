# SPDX-License-Identifier: Apache-2.0
"""Turns measurements into costs: fits of T = αN + βΣl² + γ, kept current, and saved with the run."""
