"""What Python does first in every process that tests start. PYTHONPATH names this folder."""

import gc

gc.set_threshold(50_000, 50, 1000)  # to import vLLM takes 6 s instead of 8: it makes a million objects, and no garbage
