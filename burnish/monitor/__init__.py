"""Taps that only read: metrics, their sinks, stored rollouts, the live view, the time ledger and the report."""
