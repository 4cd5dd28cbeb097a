"""When the decode clock ticks, where that is not once in each step that decodes."""
