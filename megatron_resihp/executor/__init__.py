# SPDX-License-Identifier: Apache-2.0
"""Process groups of an epoch, the reduction that all agree by, state digests, transfers. May import torch, `plan`."""
