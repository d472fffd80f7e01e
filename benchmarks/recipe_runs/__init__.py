# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/recipes.py` is made of: shrinking a recipe, running it, comparing its runs."""
