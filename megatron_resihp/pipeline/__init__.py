"""Op programs of pipeline schedules, and the simulator that times them. Imports numpy and numba, no torch.

`op` and `program` say what is run where and in which order, `schedules` makes the programs of known schedules,
`simulate` gives times to a program, `memory` its live activations. Nothing is imported here, so that training processes
can name ops without loading a compiler.
"""
