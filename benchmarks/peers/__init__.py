"""Hand-written JAX programs of the mathematics of some methods: the floor that the library is measured against."""
