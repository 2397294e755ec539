"""What to run next, by what is cached: for engines that people write themselves, and for batches. Without Ray."""

from raykv.scheduling.batches import order, split
from raykv.scheduling.steps import Budget, Request, Scheduled, plan

__all__ = ["Budget", "Request", "Scheduled", "order", "plan", "split"]
