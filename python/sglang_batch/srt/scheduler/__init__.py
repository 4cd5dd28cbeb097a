"""SGLang's scheduler, carrying out the plan."""
