"""Groups of samples over HTTP."""
