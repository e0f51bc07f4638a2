"""Text and messages to tokens."""
