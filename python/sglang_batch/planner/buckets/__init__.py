"""Jobs that are larger than memory: the cuts between buckets of prompts that begin alike."""
