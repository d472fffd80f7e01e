"""A running job: its event log and what the terminal shows."""
