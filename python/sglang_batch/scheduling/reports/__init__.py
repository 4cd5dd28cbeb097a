"""What people see of a scheduler: its running tree, what waits, the records of its steps."""
