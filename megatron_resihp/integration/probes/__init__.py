"""What is measured of an iteration, and what slows or ends it on purpose."""
