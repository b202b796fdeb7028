"""A figure as a program, to be copied for a paper of one's own."""
