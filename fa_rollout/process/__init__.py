"""What every process of a run does for itself: logging, streams, threads, private files, hidden secrets."""
