"""Rows: the database, its tables, and one module of queries a noun."""
