"""Chooses requests so that cached blocks save most work. For custom engines and batches, without Ray."""

from raykv.scheduling.batches import order, split
from raykv.scheduling.steps import Budget, Request, Scheduled, plan

__all__ = ["Budget", "Request", "Scheduled", "order", "plan", "split"]
