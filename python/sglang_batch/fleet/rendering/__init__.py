"""Lines that workers render, for the plan and to be run."""
