# SPDX-License-Identifier: Apache-2.0
"""The log of decisions: what the state machine was fed, so that feeding it to another one decides the same.

`entries` are what the log holds, `recorded` writes them, `reading` finds those of the last run, `replay` folds them
again. Pure: where the log is kept is `head`'s.
"""
