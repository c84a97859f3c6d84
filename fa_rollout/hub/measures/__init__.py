"""Where time goes and what lately happened, measured once for every reader."""
