"""Op programs of pipeline schedules, and the simulator that times them. Imports numpy and numba, no torch."""
