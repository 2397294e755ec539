"""Digests of configurations, used in the names of caches."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def config_digest(hf_config: Any) -> str:
    """Return a digest of a model's whole configuration, since any option in it may change the KV."""
    fields = json.loads(hf_config.to_json_string(use_diff=False))
    counted = {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}
    return digest(json.dumps(counted, sort_keys=True))


def digest(text: str) -> str:
    """Return a digest of a text, 16 hexadecimal characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
