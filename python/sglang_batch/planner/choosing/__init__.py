"""The best way to run a job on given devices."""
