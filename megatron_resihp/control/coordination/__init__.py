# SPDX-License-Identifier: Apache-2.0
"""The coordinator: a pure state machine, and the loop that carries out what it decides.

`epochs` says which epoch holds and what comes after it, `membership` who is alive; `coordinator` is the loop.
"""
