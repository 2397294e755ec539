"""Python runs this first in every process that tests start, as PYTHONPATH names this folder."""

import gc

gc.set_threshold(50_000, 50, 1000)  # imports make a million objects and no garbage: a start takes a tenth less
