"""AlignedServe's part of a step: rows that leave in a switch, prefetch, and prefill ahead."""
