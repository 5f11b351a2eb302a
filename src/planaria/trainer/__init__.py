"""What a trainer does with the ids of a batch before and after it computes."""

from planaria.trainer.routing import Router

__all__ = ["Router"]
