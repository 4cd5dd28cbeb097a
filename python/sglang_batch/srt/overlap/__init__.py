"""Mixed steps as two forwards at the same time: decodes and prompts."""
