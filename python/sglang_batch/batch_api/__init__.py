"""OpenAI batch semantics: objects, statuses, limits, lines. No SGLang, no torch."""
