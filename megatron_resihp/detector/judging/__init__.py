# SPDX-License-Identifier: Apache-2.0
"""How an iteration is judged: what it should have taken, how noisy that is, and whether a level has risen."""
