"""Which calls a key opens, and the routes for keys and their usage."""
