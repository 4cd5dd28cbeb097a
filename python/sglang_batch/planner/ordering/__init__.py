"""Orders of a job's requests: one function per policy, and the parts of dual-scan."""
