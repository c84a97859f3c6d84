"""Prompts in: rows of JSONL and Parquet files, their order, and their token ids."""
