"""What Python does first in every process that tests start. PYTHONPATH names this folder."""

import gc

gc.set_threshold(50_000, 50, 1000)  # what is imported is a million objects, no garbage: a start takes a tenth less
