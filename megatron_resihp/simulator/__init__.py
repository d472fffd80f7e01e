"""What would have happened: synthetic jobs with faults, on which detectors and planners are compared."""
