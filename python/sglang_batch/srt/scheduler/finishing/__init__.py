"""When a request ends: by stop rules, and by grammars that allow no token."""
