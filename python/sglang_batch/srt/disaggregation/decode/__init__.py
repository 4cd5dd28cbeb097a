"""The scheduler of a decode server, which follows the plans of jobs."""
