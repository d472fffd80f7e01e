"""`resihp report`: what a run's events say, for a terminal, as JSON and as a picture."""
