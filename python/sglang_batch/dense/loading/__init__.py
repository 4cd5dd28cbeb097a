"""A transformers model that was loaded is prepared and tried."""
