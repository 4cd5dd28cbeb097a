"""Images and other media in the prompts of lines."""
