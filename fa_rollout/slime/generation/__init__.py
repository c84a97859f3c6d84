"""In the generator: slime's own functions, run to a record."""
