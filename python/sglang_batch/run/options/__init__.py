"""The options of ``run`` and ``serve``: ours, those of engines, of fleets and of vLLM."""
