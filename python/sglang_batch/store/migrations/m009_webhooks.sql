-- endpoint: SHA-256 of its name and URL, which may contain a secret.
-- attempts: how many have begun. due_at: Unix time of the next one.
CREATE TABLE webhooks (
    id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    type TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at REAL NOT NULL,
    PRIMARY KEY (endpoint, id)
);
