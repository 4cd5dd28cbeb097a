"""The dense engine behind SGLang's serving classes."""
