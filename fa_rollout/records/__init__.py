"""What a run leaves in its folder, read back: events, samples. Nothing here needs the run to live."""
