"""The commands plan and simulate: what a job would take, and why."""
