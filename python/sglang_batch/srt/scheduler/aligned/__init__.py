"""AlignedServe beside the core: rows that leave in a switch, prefetch, and prefill ahead."""
