# SPDX-License-Identifier: Apache-2.0
"""The coordinator's decisions, as a state machine: messages and the time in, actions out.

`membership` is its front. `worker_messages`, `agent_messages` and `command_messages` say what follows from each
message, `epochs` how an epoch begins and breaks, `changes` how a plan is changed by choice, `ends` how the job ends,
`plans` which plan comes next. They share one `state`. Pure: no sockets, no clock, no processes.
"""
