# SPDX-License-Identifier: Apache-2.0
"""Process groups for a plan, and what a worker knows of a plan that Megatron's own groups can't run."""
