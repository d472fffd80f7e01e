"""The optimizer step, and the parts and copies of a distributed optimizer."""
