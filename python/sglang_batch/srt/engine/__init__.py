"""SGLang behind the Engine protocol: renders and runs requests."""
