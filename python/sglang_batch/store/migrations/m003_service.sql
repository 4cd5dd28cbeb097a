-- owner: name of the API key that made it, or empty if keys have no names.
-- api: the API that made the batch, `openai` or `anthropic`.
-- output_expires_after: seconds that its result files are kept, NULL for the default.
-- paused_reason: why a batch in progress is paused, or NULL if it is not.
-- line_errors: JSON object, number of error lines by their code.
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN api TEXT NOT NULL DEFAULT 'openai';
ALTER TABLE batches ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN expired_at INTEGER;
ALTER TABLE batches ADD COLUMN output_expires_after INTEGER;
ALTER TABLE batches ADD COLUMN paused_reason TEXT;
ALTER TABLE batches ADD COLUMN line_errors TEXT;
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE TABLE uploads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL DEFAULT '',
    status TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    mime_type TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    file_expires_after INTEGER,
    file_id TEXT
);
CREATE TABLE upload_parts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    upload_id TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE TABLE idempotent_answers (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    request_sha256 TEXT NOT NULL,
    status_code INTEGER NOT NULL,
    body BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
);
