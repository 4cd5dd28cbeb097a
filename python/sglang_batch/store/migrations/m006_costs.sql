-- dedupe: the batch's own setting, NULL for the server's.
-- enough: the share of answers after which the batch ends, NULL for all.
-- merged: lines that got the answer of an equal one, `merged_*` their tokens.
-- engine_s: seconds of the engine, divided by the work that was done.
ALTER TABLE batches ADD COLUMN dedupe TEXT;
ALTER TABLE batches ADD COLUMN enough REAL;
ALTER TABLE batches ADD COLUMN merged INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN merged_input_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN merged_cached_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN merged_output_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN engine_s REAL NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN merged_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN engine_s REAL NOT NULL DEFAULT 0;
