"""The time of a step, operator by operator."""
