"""Workers of a fleet as actors of a Ray cluster. Needs the extra ``ray``."""
