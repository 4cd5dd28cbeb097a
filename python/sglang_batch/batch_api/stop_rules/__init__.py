"""Rules that end an answer where the rest of it is useless; pure, of any engine."""
