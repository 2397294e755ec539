"""A KV-cache pool for LLM inference that lives inside a Ray cluster."""

from raykv.cache import KVCache, Match
from raykv.client import KVPool, attach, start
from raykv.config import PoolConfig
from raykv.errors import ArenaMismatch, CapacityError, PoolNotFound, RayKVError

__all__ = [
    "ArenaMismatch",
    "CapacityError",
    "KVCache",
    "KVPool",
    "Match",
    "PoolConfig",
    "PoolNotFound",
    "RayKVError",
    "attach",
    "start",
]
