"""Virtual time: how long simulated clients take, and which replies are in flight."""
