"""The only room (beside `cpu`) that imports megatron: one module per patched seam, and the runtime that they share."""
