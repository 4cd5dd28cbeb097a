"""The plugin that SGLang loads: flags, hooks, routes and the CPU platform."""
