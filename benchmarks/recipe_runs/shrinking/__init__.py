# SPDX-License-Identifier: Apache-2.0
"""A recipe, which is a launch configuration for GPUs, as a command line for a few CPU workers: hand-written rules."""
