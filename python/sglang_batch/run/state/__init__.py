"""The state of a job at a URL, so that it resumes on any machine."""
