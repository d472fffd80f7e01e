# SPDX-License-Identifier: Apache-2.0
"""The key-value store that all processes of a job share: what it holds, its server at node 0, and the ways to it.

A worker asks its node's agent (`by_agent`), which asks for all of them over one line (`relay`). Agents and commands
connect themselves (`client`), again where a connection was lost (`lasting`).
"""
