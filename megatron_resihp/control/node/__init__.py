# SPDX-License-Identifier: Apache-2.0
"""What runs on every node: the agent, the workers' first code, and what watches, slows and ends them."""
