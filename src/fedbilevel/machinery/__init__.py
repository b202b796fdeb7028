"""Helpers for JAX that do not depend on bilevel problems: cached programs, hashes and random bits."""
