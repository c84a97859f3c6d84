"""What the hub reports: snapshots, progress lines, metrics. Reads the state, changes nothing."""
