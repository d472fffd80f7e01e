# SPDX-License-Identifier: Apache-2.0
"""The cost of work: fitted coefficients, links, layers, memory. Imports numpy and scipy, no torch."""
