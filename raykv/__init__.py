"""A KV-cache pool for LLM inference that lives inside a Ray cluster."""

from importlib.metadata import version

from raykv.client.cache import KVCache, Match
from raykv.client.pool import KVPool, attach, start
from raykv.config import PoolConfig
from raykv.errors import ArenaMismatch, CapacityError, PoolNotFound, RayKVError
from raykv.tiers import register_tier

__version__ = version("raykv")

__all__ = [
    "ArenaMismatch",
    "CapacityError",
    "KVCache",
    "KVPool",
    "Match",
    "PoolConfig",
    "PoolNotFound",
    "RayKVError",
    "__version__",
    "attach",
    "register_tier",
    "start",
]
