"""SGLang's HiCache on a pool, loaded by configuration alone: its third tier is the memory of the cluster."""

from raykv.integrations.sglang.storage import RayKVStorage

__all__ = ["RayKVStorage"]
