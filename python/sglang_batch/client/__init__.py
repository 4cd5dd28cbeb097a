"""Commands for the batches of a server: submit, status, list, cancel, results."""
