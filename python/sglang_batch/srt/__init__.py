"""The SGLang edge: the only room that imports ``sglang`` and ``torch``."""
