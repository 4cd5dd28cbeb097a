-- JSON of the W3C headers of the call that made a batch.
ALTER TABLE batches ADD COLUMN trace_context TEXT NOT NULL DEFAULT '{}';
