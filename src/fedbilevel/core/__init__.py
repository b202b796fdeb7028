"""Problems, clients, algorithms and the protocol between them; everything else builds on this room."""
