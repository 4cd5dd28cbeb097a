-- deleted: lists continue after them, and a repeated deletion has the same answer.
-- deleted.kind: `files`, or the API of a batch.
-- uploads.completed_with: JSON of the parts and the checksum of the call, NULL if not yet.
CREATE TABLE deleted (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    seq INTEGER NOT NULL,
    owner TEXT NOT NULL,
    deleted_at INTEGER NOT NULL
);
CREATE TRIGGER files_deleted AFTER DELETE ON files BEGIN
    INSERT OR REPLACE INTO deleted (id, kind, seq, owner, deleted_at) VALUES
    (OLD.id, 'files', OLD.seq, OLD.owner, CAST(strftime('%s') AS INTEGER));
END;
CREATE TRIGGER batches_deleted AFTER DELETE ON batches BEGIN
    INSERT OR REPLACE INTO deleted (id, kind, seq, owner, deleted_at) VALUES
    (OLD.id, OLD.api, OLD.seq, OLD.owner, CAST(strftime('%s') AS INTEGER));
END;
ALTER TABLE uploads ADD COLUMN completed_with TEXT;
