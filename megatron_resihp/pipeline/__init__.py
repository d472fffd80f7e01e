# SPDX-License-Identifier: Apache-2.0
"""Op programs of pipeline schedules, and the simulator that times them. Imports numpy and numba, no torch.

`op` and `program` say what is run where and in which order, `schedules` makes the programs of known schedules,
`list_scheduling` programs for given durations; `simulate` gives times to a program, `memory` its live activations,
`bounds` what no program can beat. Nothing is imported here, so that training processes can name ops without loading a
compiler.
"""
