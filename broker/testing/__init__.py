"""What tests and simulations need of the broker: a store in memory that runs the real functions."""
