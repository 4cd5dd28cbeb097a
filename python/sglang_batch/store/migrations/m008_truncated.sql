-- Answers of a batch that ended at their limit of tokens.
ALTER TABLE batches ADD COLUMN truncated INTEGER NOT NULL DEFAULT 0;
