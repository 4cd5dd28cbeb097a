"""What engines measure of themselves, for planning."""
