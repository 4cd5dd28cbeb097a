"""The tables of the database, as numbered migrations that are applied once each."""

from __future__ import annotations

import sqlite3


def m001_files_and_batches(db: sqlite3.Connection) -> None:
    """Files as clients see them, and batches with every field of the OpenAI object."""
    db.execute(
        """
        CREATE TABLE files (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            purpose TEXT NOT NULL,
            filename TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER
        )
        """
    )
    db.execute(
        """
        CREATE TABLE batches (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            status TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file_id TEXT NOT NULL,
            completion_window TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER NOT NULL,
            metadata TEXT,
            model TEXT,
            errors TEXT,
            output_file_id TEXT,
            error_file_id TEXT,
            in_progress_at INTEGER,
            finalizing_at INTEGER,
            completed_at INTEGER,
            failed_at INTEGER,
            cancelling_at INTEGER,
            cancelled_at INTEGER,
            total INTEGER NOT NULL DEFAULT 0,
            completed INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            input_tokens INTEGER NOT NULL DEFAULT 0,
            cached_tokens INTEGER NOT NULL DEFAULT 0,
            output_tokens INTEGER NOT NULL DEFAULT 0,
            reasoning_tokens INTEGER NOT NULL DEFAULT 0
        )
        """
    )
    db.execute("CREATE INDEX batches_by_status ON batches (status)")


def m002_optimal_cached_share(db: sqlite3.Connection) -> None:
    """Share of a batch's prompt tokens that a perfect prefix cache would save."""
    db.execute("ALTER TABLE batches ADD COLUMN optimal_cached_share REAL")


def m003_service(db: sqlite3.Connection) -> None:
    """Owners, priorities, expiry, uploads in parts, and answers to earlier calls.

    owner: name of the API key that made it, or empty if keys have no names.
    api: the API that made the batch, ``openai`` or ``anthropic``.
    output_expires_after: seconds that its result files are kept, NULL for the default.
    paused_reason: why a batch in progress is paused, or NULL if it is not.
    line_errors: JSON object, number of error lines by their code.
    """
    for column in (
        "owner TEXT NOT NULL DEFAULT ''",
        "api TEXT NOT NULL DEFAULT 'openai'",
        "priority INTEGER NOT NULL DEFAULT 0",
        "expired_at INTEGER",
        "output_expires_after INTEGER",
        "paused_reason TEXT",
        "line_errors TEXT",
    ):
        db.execute(f"ALTER TABLE batches ADD COLUMN {column}")
    db.execute("ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
    _create_uploads(db)
    db.execute(
        """
        CREATE TABLE idempotent_answers (
            owner TEXT NOT NULL,
            key TEXT NOT NULL,
            request_sha256 TEXT NOT NULL,
            status_code INTEGER NOT NULL,
            body BLOB NOT NULL,
            created_at INTEGER NOT NULL,
            PRIMARY KEY (owner, key)
        )
        """
    )


def _create_uploads(db: sqlite3.Connection) -> None:
    db.execute(
        """
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
        )
        """
    )
    db.execute(
        """
        CREATE TABLE upload_parts (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            upload_id TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL
        )
        """
    )


def m004_error_reasons(db: sqlite3.Connection) -> None:
    """JSON list of the reasons of error lines: code, message and number of lines."""
    db.execute("ALTER TABLE batches ADD COLUMN error_reasons TEXT")


def m005_keys(db: sqlite3.Connection) -> None:
    """Keys, their clients' limits, and their usage of each day.

    clients.models: JSON list of names, NULL for all.
    clients.batches, lines, tokens: limits for a day, NULL for none.
    usage.day: UTC, such as 2026-11-23.
    """
    db.execute(
        """
        CREATE TABLE clients (
            name TEXT PRIMARY KEY,
            role TEXT NOT NULL,
            models TEXT,
            batches INTEGER,
            lines INTEGER,
            tokens INTEGER
        )
        """
    )
    db.execute(
        """
        CREATE TABLE keys (
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL REFERENCES clients,
            sha256 BLOB NOT NULL UNIQUE,
            hint TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            revoked_at INTEGER
        )
        """
    )
    db.execute(
        """
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
        )
        """
    )


def m006_costs(db: sqlite3.Connection) -> None:
    """What batches and clients cost, and options of a batch that save some of it.

    dedupe: the batch's own setting, NULL for the server's.
    enough: the share of answers after which the batch ends, NULL for all.
    merged: lines that got the answer of an equal one, ``merged_*`` their tokens.
    engine_s: seconds of the engine, divided by the work that was done.
    """
    for column in (
        "dedupe TEXT",
        "enough REAL",
        "merged INTEGER NOT NULL DEFAULT 0",
        "merged_input_tokens INTEGER NOT NULL DEFAULT 0",
        "merged_cached_tokens INTEGER NOT NULL DEFAULT 0",
        "merged_output_tokens INTEGER NOT NULL DEFAULT 0",
        "engine_s REAL NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE batches ADD COLUMN {column}")
    for column in (
        "merged_tokens INTEGER NOT NULL DEFAULT 0",
        "engine_s REAL NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE usage ADD COLUMN {column}")


def m007_deleted(db: sqlite3.Connection) -> None:
    """What is known of deleted files and batches, and how an upload was completed.

    deleted: lists go on behind them, and a repeated deletion has the same answer.
    deleted.kind: ``files``, or the API of a batch.
    uploads.completed_with: JSON of the parts and the checksum of the call, NULL if not yet.
    """
    db.execute(
        """
        CREATE TABLE deleted (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL,
            seq INTEGER NOT NULL,
            owner TEXT NOT NULL,
            deleted_at INTEGER NOT NULL
        )
        """
    )
    for table, kind in (("files", "'files'"), ("batches", "OLD.api")):
        db.execute(
            f"CREATE TRIGGER {table}_deleted AFTER DELETE ON {table} BEGIN"
            " INSERT OR REPLACE INTO deleted (id, kind, seq, owner, deleted_at) VALUES"
            f" (OLD.id, {kind}, OLD.seq, OLD.owner, CAST(strftime('%s') AS INTEGER));"
            " END"
        )
    db.execute("ALTER TABLE uploads ADD COLUMN completed_with TEXT")


def m008_truncated(db: sqlite3.Connection) -> None:
    """Answers of a batch that ended at their limit of tokens."""
    db.execute("ALTER TABLE batches ADD COLUMN truncated INTEGER NOT NULL DEFAULT 0")


MIGRATIONS = (
    m001_files_and_batches,
    m002_optimal_cached_share,
    m003_service,
    m004_error_reasons,
    m005_keys,
    m006_costs,
    m007_deleted,
    m008_truncated,
)


def migrate(db: sqlite3.Connection) -> None:
    """Bring a database, new or old, to the newest schema."""
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY)")
        done = {name for (name,) in db.execute("SELECT name FROM migrations")}
        for migration in MIGRATIONS:
            if migration.__name__ not in done:
                migration(db)
                db.execute("INSERT INTO migrations VALUES (?)", (migration.__name__,))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
