# SPDX-License-Identifier: Apache-2.0
"""A model as the list of its layers, with the parts of each, from Megatron's arguments."""
