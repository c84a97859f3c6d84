"""The account of a run: what the hub writes down, and what everyone who shows or checks a run reads."""
