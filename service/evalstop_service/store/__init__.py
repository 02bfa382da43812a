"""The database: connections, tables, and one module of queries for each kind of row."""
