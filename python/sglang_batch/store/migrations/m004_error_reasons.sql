-- JSON list of the reasons of error lines: code, message and number of lines.
ALTER TABLE batches ADD COLUMN error_reasons TEXT;
