-- Measured costs: seconds and bytes. A row's key is everything that its numbers depend on.
-- 9e999 is SQLite's infinity; NaN is stored as NULL, which NOT NULL refuses.

CREATE TABLE IF NOT EXISTS operators (
    fingerprint       TEXT    NOT NULL,  -- of the device
    torch_version     TEXT    NOT NULL,
    threads           INTEGER NOT NULL,
    key               TEXT    NOT NULL,  -- operator, local shapes, dtypes, constant arguments
    forward_seconds   REAL    NOT NULL CHECK (forward_seconds >= 0 AND forward_seconds < 9e999),
    backward_seconds  REAL    NOT NULL CHECK (backward_seconds >= 0 AND backward_seconds < 9e999),
    saved_operands    TEXT    NOT NULL,  -- positions, as a JSON list
    saved_results     TEXT    NOT NULL,  -- positions, as a JSON list
    saved_extra_bytes INTEGER NOT NULL CHECK (saved_extra_bytes >= 0),
    saved_bytes       INTEGER NOT NULL CHECK (saved_bytes >= 0),
    scratch_bytes     INTEGER CHECK (scratch_bytes >= 0),  -- NULL: the device has no counter
    runs              INTEGER NOT NULL,
    spread            REAL    NOT NULL,  -- interquartile range over median
    measured_at       TEXT    NOT NULL,
    PRIMARY KEY (fingerprint, torch_version, threads, key)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS collectives (
    fingerprint       TEXT    NOT NULL,
    torch_version     TEXT    NOT NULL,
    threads           INTEGER NOT NULL,
    kind              TEXT    NOT NULL,
    backend           TEXT    NOT NULL,
    size              INTEGER NOT NULL,  -- ranks in the group
    nodes             INTEGER NOT NULL,  -- nodes that the group spans
    nbytes            INTEGER NOT NULL,  -- of the full tensor
    seconds           REAL    NOT NULL CHECK (seconds >= 0 AND seconds < 9e999),
    runs              INTEGER NOT NULL,
    spread            REAL    NOT NULL,
    measured_at       TEXT    NOT NULL,
    PRIMARY KEY (fingerprint, torch_version, threads, kind, backend, size, nodes, nbytes)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS devices (  -- calibrated rooflines
    fingerprint       TEXT    NOT NULL,
    torch_version     TEXT    NOT NULL,
    threads           INTEGER NOT NULL,
    name              TEXT    NOT NULL,
    kind              TEXT    NOT NULL,  -- torch's device type
    flops             TEXT    NOT NULL,  -- flop/s by dtype, as a JSON object
    bandwidth         REAL    NOT NULL CHECK (bandwidth > 0 AND bandwidth < 9e999),
    launch_seconds    REAL    NOT NULL CHECK (launch_seconds >= 0 AND launch_seconds < 9e999),
    measured_at       TEXT    NOT NULL,
    PRIMARY KEY (fingerprint, torch_version, threads)
) WITHOUT ROWID;
