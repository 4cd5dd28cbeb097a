"""Steps that yield several tokens of a request."""
