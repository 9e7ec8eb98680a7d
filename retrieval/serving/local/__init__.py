"""The embedded store: SQLite is the record of items, immutable segments hold their vectors."""
