# SPDX-License-Identifier: Apache-2.0
"""A pairwise covering array of flags that few or no recipes have: each two values that go together are in some row."""
