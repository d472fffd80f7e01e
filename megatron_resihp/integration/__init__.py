"""Megatron's side: the only package, beside `cpu`, that imports megatron."""
