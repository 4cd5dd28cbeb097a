"""The commands plan and simulate: predict how long a job takes, and explain why."""
