"""A figure of a paper as a program, which you can copy for a paper of your own."""
