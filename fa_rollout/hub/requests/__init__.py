"""Messages of ranks, generator and launcher, each answered by one handler."""
