"""The requests that join the next step."""
