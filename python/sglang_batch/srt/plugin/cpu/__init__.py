"""What SGLang lacks where there is no accelerator."""
