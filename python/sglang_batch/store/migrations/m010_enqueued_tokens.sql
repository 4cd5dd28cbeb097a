-- Most estimated tokens of a client's batches in progress, NULL for max_enqueued_tokens.
ALTER TABLE clients ADD COLUMN enqueued_tokens INTEGER;
