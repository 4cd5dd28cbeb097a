"""Who may call a server: keys, their roles, their limits and their usage."""
