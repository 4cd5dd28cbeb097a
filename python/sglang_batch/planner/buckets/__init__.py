"""Plans of jobs that are larger than memory: bucket by bucket, then units to engines."""
