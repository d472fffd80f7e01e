# SPDX-License-Identifier: Apache-2.0
"""What work costs: fitted coefficients, links, layers, memory. Imports numpy and scipy, no torch."""
