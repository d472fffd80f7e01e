"""The control plane: what starts the workers, notices that one is gone, and agrees on who goes on.

Importing this package imports nothing. Its modules may import each other, `megatron_resihp.plan` and the standard
library; torch only inside functions, and never megatron.
"""
