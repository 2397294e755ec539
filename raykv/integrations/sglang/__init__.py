"""SGLang's HiCache on a pool, loaded by configuration alone: the third tier of its KV cache is the cluster's memory."""

from raykv.integrations.sglang.storage import RayKVStorage

__all__ = ["RayKVStorage"]
