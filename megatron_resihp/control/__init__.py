# SPDX-License-Identifier: Apache-2.0
"""The control plane: what starts the workers, notices that one is gone, and agrees on which workers go on.

Importing this package imports nothing. From top to bottom: `commands`; `head`, for node 0; `node` and `worker`, for
every other process; `coordination`; `replanning`; `transport`; and a few modules that all of them use. May import the
packages below it and the standard library; torch only inside functions, and never megatron.
"""
