"""Run rounds: engines simulate or reach clients, and a loop drives them. No engine knows a particular algorithm."""
