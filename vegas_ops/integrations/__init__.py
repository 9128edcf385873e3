"""Adapters for engines, one module each; none is imported unless asked for."""
