"""SGLang frontend programs, run together as one job."""
