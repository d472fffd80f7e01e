# SPDX-License-Identifier: Apache-2.0
"""`resihp detect`: a recorded run, or a table of times, through the detector. Here are the names of what it writes."""

from typing import Final

VERDICTS_NAME: Final = "verdicts.json"
PICTURE_NAME: Final = "detection.png"
