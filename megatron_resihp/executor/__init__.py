"""Process groups of an epoch, the reduction that all agree by, state digests and transfers. May import torch and `plan`."""
