"""Parquet in, figures, tables, README sections and an HTML report out. No torch, no engine."""
