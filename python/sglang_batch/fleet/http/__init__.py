"""Workers at URLs: offline servers that somebody else starts."""
