-- clients.models: JSON list of names, NULL for all.
-- clients.batches, lines, tokens: limits for a day, NULL for none.
-- usage.day: UTC, such as 2026-11-23.
CREATE TABLE clients (
    name TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    models TEXT,
    batches INTEGER,
    lines INTEGER,
    tokens INTEGER
);
CREATE TABLE keys (
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL REFERENCES clients,
    sha256 BLOB NOT NULL UNIQUE,
    hint TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
);
CREATE TABLE usage (
    day TEXT NOT NULL,
    name TEXT NOT NULL,
    batches INTEGER NOT NULL DEFAULT 0,
    lines INTEGER NOT NULL DEFAULT 0,
    calls INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (day, name)
);
