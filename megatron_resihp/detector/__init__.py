# SPDX-License-Identifier: Apache-2.0
"""Finds slow workers and links: compares what probes record with what should have been, at a stated false-alarm rate.

`records` is what a worker measures and sends; `observations` holds the same for all workers of one iteration, as
arrays. All judgement is a function of observations and needs neither processes nor Megatron.
"""
