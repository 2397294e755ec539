"""What Python does first in every process that tests start. PYTHONPATH names this folder."""

import gc
import os

if "VLLM_NO_USAGE_STATS" in os.environ:  # to import vLLM takes 6 s instead of 8: it makes a million objects, no garbage
    gc.set_threshold(50_000, 50, 1000)
