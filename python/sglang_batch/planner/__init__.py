"""Pure planning: token ids in, an order out. numpy only."""

from .order import make_order, optimal_prefix_sharing_ratio

__all__ = ["make_order", "optimal_prefix_sharing_ratio"]
