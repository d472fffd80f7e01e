# SPDX-License-Identifier: Apache-2.0
"""The two ways to run a plan: by Megatron's own groups if it is uniform, stage by stage if it is heterogeneous."""
