# SPDX-License-Identifier: Apache-2.0
"""What was measured, made into costs: fits of T = αN + βΣl² + γ, kept current, and saved with the run."""
