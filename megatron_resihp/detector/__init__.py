# SPDX-License-Identifier: Apache-2.0
"""Who is slow: what probes record, what should have been, and a verdict with a stated false-alarm rate.

`records` is what a worker measures and sends, `observations` the same for all workers of one iteration as arrays; all
judgement is a function of observations and needs neither processes nor Megatron.
"""
