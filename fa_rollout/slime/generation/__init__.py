"""In the generator: runs slime's own functions and turns each group into a record."""
