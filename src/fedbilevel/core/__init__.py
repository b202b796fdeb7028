"""Define problems, clients, algorithms and the protocol between them; all other packages build on this one."""
