"""A KV-cache pool for LLM inference that lives inside a Ray cluster."""

from importlib.metadata import version

from raykv.client.cache import KVCache
from raykv.client.leases.match import Match
from raykv.client.pool import KVPool, attach
from raykv.config import PoolConfig
from raykv.errors import ArenaMismatch, CapacityError, PoolNotFound, ProtocolMismatch, RayKVError
from raykv.keys import Keys
from raykv.start import start
from raykv.tiers import register_tier

__version__ = version("raykv")

__all__ = [
    "ArenaMismatch",
    "CapacityError",
    "KVCache",
    "KVPool",
    "Keys",
    "Match",
    "PoolConfig",
    "PoolNotFound",
    "ProtocolMismatch",
    "RayKVError",
    "__version__",
    "attach",
    "register_tier",
    "start",
]
