# SPDX-License-Identifier: Apache-2.0
"""Replanning: which process plans, with what, and when: after a death, ahead of one, and by choice.

The decisions are pure; a process of its own plans.
"""
