"""The training loop of a worker: iterations, recoveries, changes of plan, and how a job ends."""
