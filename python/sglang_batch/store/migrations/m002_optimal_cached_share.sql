-- Share of a batch's prompt tokens that a perfect prefix cache would save.
ALTER TABLE batches ADD COLUMN optimal_cached_share REAL;
