"""Where the clients are, and the loop over rounds; no engine knows any particular algorithm."""
