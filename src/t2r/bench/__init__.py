"""Measurements: each module measures one thing, returns a report, and can lay it out as tables."""
