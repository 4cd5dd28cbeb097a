"""The search of ``--choose``: its options and its report."""
