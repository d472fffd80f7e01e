# SPDX-License-Identifier: Apache-2.0
"""The coordinator: a pure state machine, and the loop that carries out what it decides.

`state_machine` decides, `coordinator` is the loop, `door` refuses messages that can't be.
"""
