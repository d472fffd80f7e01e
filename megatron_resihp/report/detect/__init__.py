"""`resihp detect`: a recorded run, or a table of times, through the detector."""
