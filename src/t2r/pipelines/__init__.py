"""Whole ways from one folder to another."""
