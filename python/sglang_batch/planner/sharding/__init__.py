"""A job cut into shards of equal work, one per data-parallel replica."""
