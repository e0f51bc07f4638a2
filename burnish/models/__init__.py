"""Loading, running and writing models."""
