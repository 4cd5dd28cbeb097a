"""Modules under their earlier names, for one release: on the path of the package."""
