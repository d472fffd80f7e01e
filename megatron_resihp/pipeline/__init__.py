# SPDX-License-Identifier: Apache-2.0
"""Op programs of pipeline schedules, and the simulator that times them. Imports numpy and numba, no torch.

`op` and `program` say which device runs which op, and in which order. `schedules` makes the programs of known
schedules, and `list_scheduling` makes programs for given durations. `simulate` gives times to a program, `memory` gives
its live activations, and `bounds` the least time of any program. Nothing is imported here, so that training processes
can name ops without loading a compiler.
"""
