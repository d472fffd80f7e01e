# SPDX-License-Identifier: Apache-2.0
"""Events of a run -> what a person or a program wants to know about it.

The room reads and writes one file, RUN_DIR/events.jsonl (docs/events.md), and turns it into a summary, a page
for the terminal, JSON, a picture and a live progress line. It may import the standard library, rich,
matplotlib (only when a picture is drawn) and `megatron_resihp.plan`; no torch, no megatron.
"""
