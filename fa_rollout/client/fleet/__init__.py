"""All engines of a pool: which get requests, which are out, which come and go."""
