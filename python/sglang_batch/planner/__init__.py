"""Pure planning: token ids in, an order out. numpy and numba only."""
