# SPDX-License-Identifier: Apache-2.0
"""Events of a run -> reports for people and programs.

This package reads and writes one file, RUN_DIR/events.jsonl (docs/events.md), and turns it into a summary, a page
for the terminal, JSON, a picture and a live progress line. It may import the standard library, rich,
matplotlib (only when a picture is drawn) and `megatron_resihp.plan`; no torch, no megatron.
"""
