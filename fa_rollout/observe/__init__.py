"""Looking at a run from outside: where it stands, in a terminal and in other people's dashboards."""
