"""Parts of the benchmark of AlignedServe's ideas."""
