"""The batches of a server: accepting, running and finishing them."""
