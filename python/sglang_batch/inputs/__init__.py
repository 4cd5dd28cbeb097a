"""Whatever names a job's requests, brought into one local file of batch lines."""
