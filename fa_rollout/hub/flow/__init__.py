"""Which groups may start and which make a batch. Pure: no I/O, no clock."""
