# SPDX-License-Identifier: Apache-2.0
"""Forward and backward steps of one worker in a plan's own order, and the messages between them."""
