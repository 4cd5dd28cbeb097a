"""The SGLang release that is supported, and the private API in use."""
